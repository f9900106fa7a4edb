#include "core/plan/batch/latency_batching.hpp"

#include <algorithm>
#include <bit>

#include "core/base/error.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/partition.hpp"

namespace ballast {
namespace {

struct RankSamples {
  std::vector<std::uint32_t> samples;
  std::vector<double> weights;
};

/// Tokens that a sample takes up in a pack.
std::int64_t room(const SampleLength& s, const BatchingOptions& options) {
  return axis_tokens(s, options.align);
}

bool within(const Partition& bins, const RankSamples& rank,
            const std::vector<SampleLength>& samples, const BatchingOptions& options) {
  return std::all_of(bins.begin(), bins.end(), [&](const auto& bin) {
    std::int64_t tokens = 0;
    for (const std::uint32_t i : bin) tokens += room(samples[rank.samples[i]], options);
    return bin.size() <= 1 || tokens <= options.micro_batch_tokens;
  });
}

}  // namespace

Batch plan_weighted(std::int64_t step, const std::vector<SampleLength>& samples,
                    std::span<const double> weights, const BatchingOptions& options) {
  require(weights.size() == samples.size(), "{} weights for {} samples", weights.size(),
          samples.size());
  const Partition over_ranks = balanced_partition(weights, options.dp);
  std::vector<RankSamples> ranks;
  std::int64_t tokens = 0;
  for (const auto& members : over_ranks) {
    RankSamples& rank = ranks.emplace_back(RankSamples{members, {}});
    std::int64_t sum = 0;
    for (const std::uint32_t i : members) {
      rank.weights.push_back(weights[i]);
      sum += room(samples[i], options);
    }
    tokens = std::max(tokens, sum);
  }
  const auto count = [](std::int64_t n, std::int64_t per) {
    return static_cast<int>(std::max<std::int64_t>(1, (n + per - 1) / per));
  };
  const bool by_samples = options.micro_batch_samples > 0;
  int micro_batches = by_samples ? count(static_cast<std::int64_t>(samples.size()),
                                         std::int64_t{1} * options.micro_batch_samples * options.dp)
                                 : count(tokens, options.micro_batch_tokens);
  Batch batch;
  batch.step = step;
  for (const RankSamples& rank : ranks) {
    Partition bins = balanced_partition(rank.weights, micro_batches);
    // One sample a bin fits always; samples of no weight stay together.
    for (int more = micro_batches + 1; !by_samples && !within(bins, rank, samples, options);
         ++more) {
      require(more <= micro_batches + static_cast<int>(rank.samples.size()),
              "samples of no weight fill a micro-batch of more than {} tokens: predicted latencies "
              "must not be 0",
              options.micro_batch_tokens);
      bins = balanced_partition(rank.weights, more);
    }
    auto& list = batch.micro_batches.emplace_back();
    for (const auto& bin : bins) {
      if (bin.empty()) continue;
      MicroBatch& m = list.emplace_back();
      for (const std::uint32_t i : bin) {
        const SampleLength& s = samples[rank.samples[i]];
        m.segments.push_back({s.sample, 0, s.tokens, s.loss_tokens});
      }
    }
  }
  return batch;
}

int BudgetAverages::bin(std::int64_t tokens) {
  return std::min(kBins - 1, static_cast<int>(std::bit_width(
                                 static_cast<std::uint64_t>(std::max<std::int64_t>(tokens, 0)))));
}

void BudgetAverages::update(std::span<const double> sums, std::span<const double> counts) {
  require(sums.size() == average_.size() && counts.size() == average_.size(),
          "budget averages: {} sums for {} bins", sums.size(), average_.size());
  for (std::size_t b = 0; b < average_.size(); ++b)
    if (counts[b] > 0) average_[b] = decay_ * average_[b] + (1 - decay_) * sums[b] / counts[b];
}

void BudgetAverages::restore(std::vector<double> values) {
  require(values.size() == average_.size(),
          "budget averages: {} values for {} length bins; the checkpoint is of another version",
          values.size(), average_.size());
  average_ = std::move(values);
}

}  // namespace ballast
