// Batch plans from packs: which packs run at the same time, and on which ranks.
#include "core/plan/batch/batch_plan.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <span>
#include <stdexcept>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/batch/chunking.hpp"
#include "core/plan/batch/latency_batching.hpp"
#include "core/plan/batch/packing.hpp"
#include "core/plan/batch/pairs.hpp"
#include "core/plan/batch/placed_batch.hpp"

namespace ballast {
namespace {

using Samples = std::vector<SampleLength>;
using Numbers = std::vector<std::uint32_t>;

/// Packs of one group that run at the same time.
struct Round {
  std::uint32_t group = 0;
  Numbers packs;
};

/// How a method packs that is a packing baseline.
PackMethod baseline_packing(Batching method) {
  switch (method) {
    case Batching::random:
      return PackMethod::random;
    case Batching::sorted:
      return PackMethod::sorted;
    case Batching::isf:
      return PackMethod::isf;
    case Batching::ffs:
      return PackMethod::ffs;
    case Batching::ffd:
      return PackMethod::ffd;
    case Batching::bfs:
      return PackMethod::bfs;
    case Batching::spfhp:
      return PackMethod::spfhp;
    default:
      throw std::logic_error(fmt::format("{} is no packing baseline", name(method)));
  }
}

class Planner {
 public:
  Planner(const Samples& samples, const BatchingOptions& options, std::uint64_t stream)
      : samples_(samples), options_(options), stream_(stream) {
    require(options.dp >= 1, "mesh.dp = {}: a batch needs at least one data-parallel rank",
            options.dp);
    std::vector<std::int64_t> lengths(samples.size());
    std::transform(samples.begin(), samples.end(), lengths.begin(),
                   [&](const SampleLength& s) { return axis_tokens(s, options.align); });
    if (options.method == Batching::hbp) {
      groups_ = options.groups;
      // Padding alone makes no sample too long for its group.
      for (std::size_t i = 0; i < lengths.size(); ++i)
        if (const std::size_t g = group_of(samples[i].tokens, groups_); g < groups_.size())
          lengths[i] = std::min(lengths[i], groups_[g].tokens);
      GroupedPacking grouped = hbp_packing(
          lengths, groups_, options.dp, options.balance && options.packing == GroupPacking::alike,
          options.seed + stream);
      packs_ = std::move(grouped.packs);
      group_ = std::move(grouped.group);
    } else {
      groups_ = {{options.micro_batch_tokens, 1, -1}};
      packs_ = single_level(lengths);
      group_.assign(packs_.size(), 0);
    }
    aligned_ =
        std::any_of(groups_.begin(), groups_.end(), [](const PackGroup& g) { return g.ranks > 1; });
    cost_.resize(packs_.size());
    squares_.resize(packs_.size());
    for (std::size_t p = 0; p < packs_.size(); ++p)
      for (const std::uint32_t i : packs_[p]) {
        // The answers of a pair do not see each other.
        const std::int64_t chosen =
            axis_tokens(SampleLength{0, samples[i].chosen_tokens}, options.align);
        const std::int64_t first = std::min(lengths[i], chosen);
        for (const auto tokens : {first, lengths[i] - first}) {
          const auto part = static_cast<double>(tokens);
          squares_[p] += part * part;
          cost_[p] += part + options.pair_cost_tokens * part * (part + 1) / 2;
        }
      }
  }

  std::vector<Round> rounds() const {
    std::vector<Round> all;
    for (std::size_t begin = 0, end = 0; begin < group_.size(); begin = end) {
      const std::uint32_t group = group_[begin];
      while (end < group_.size() && group_[end] == group) ++end;
      for (Numbers& packs : cut(begin, end, group)) all.push_back({group, std::move(packs)});
    }
    return all;
  }

  /// Adds a round: the heaviest pack to the ranks with the least cost so far; as they come without
  /// balance.
  void add(Batch& batch, std::vector<double>& load, const Round& round) const {
    const PackGroup& group = groups_[round.group];
    const std::size_t ranks = static_cast<std::size_t>(group.ranks);
    Numbers packs = round.packs;
    if (balanced())
      std::stable_sort(packs.begin(), packs.end(),
                       [&](std::uint32_t a, std::uint32_t b) { return cost_[a] > cost_[b]; });
    const auto block_load = [&](std::size_t b) {
      return *std::max_element(load.begin() + static_cast<std::ptrdiff_t>(b * ranks),
                               load.begin() + static_cast<std::ptrdiff_t>((b + 1) * ranks));
    };
    std::vector<std::size_t> blocks(load.size() / ranks);
    std::iota(blocks.begin(), blocks.end(), std::size_t{0});
    if (balanced())
      std::stable_sort(blocks.begin(), blocks.end(),
                       [&](std::size_t a, std::size_t b) { return block_load(a) < block_load(b); });
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const bool idle = i >= packs.size();
      if (idle && !aligned_) break;  // rounds need not meet where no rank shares a pack
      for (std::size_t d = blocks[i] * ranks; d < (blocks[i] + 1) * ranks; ++d) {
        batch.micro_batches[d].push_back({{}, group.ranks, group.recompute_layers});
        if (!idle) load[d] += cost_[packs[i]] / static_cast<double>(ranks);
      }
      if (!idle) batch.micro_batches[blocks[i] * ranks].back().segments = segments(packs[i]);
    }
  }

  /// All packs, the heaviest first, each to the least loaded rank, ties to the lower rank (longest
  /// processing time first).
  void add_all(Batch& batch) const {
    Numbers order(packs_.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return cost_[a] > cost_[b]; });
    using Load = std::pair<double, int>;
    std::priority_queue<Load, std::vector<Load>, std::greater<>> load;
    for (int d = 0; d < options_.dp; ++d) load.emplace(0.0, d);
    for (const std::uint32_t p : order) {
      const auto [sum, d] = load.top();
      load.pop();
      batch.micro_batches[static_cast<std::size_t>(d)].push_back(
          {segments(p), 1, groups_[group_[p]].recompute_layers});
      load.emplace(sum + cost_[p], d);
    }
  }

  /// Packs in turn, the first to rank 0.
  void deal(Batch& batch) const {
    std::size_t d = 0;
    for (const Round& round : rounds())
      for (const std::uint32_t p : round.packs)
        batch.micro_batches[d++ % batch.micro_batches.size()].push_back(
            {segments(p), 1, groups_[round.group].recompute_layers});
  }

  bool balanced() const { return options_.method != Batching::hbp || options_.balance; }
  bool aligned() const { return aligned_; }
  std::size_t ranks() const { return static_cast<std::size_t>(options_.dp); }

 private:
  Packing single_level(std::span<const std::int64_t> lengths) const {
    if (options_.method == Batching::packed)
      return pack_lengths(PackMethod::bfd, lengths, options_.micro_batch_tokens);
    if (options_.method != Batching::none)
      return pack_lengths(baseline_packing(options_.method), lengths, options_.micro_batch_tokens,
                          options_.seed + stream_);
    Packing packs;
    const auto together = static_cast<std::size_t>(std::max(1, options_.micro_batch_samples));
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      packs.items.push_back(static_cast<std::uint32_t>(i));
      if ((i + 1) % together == 0 || i + 1 == lengths.size()) packs.close();
    }
    return packs;
  }

  /// Packs [begin, end) of one group as rounds.
  std::vector<Numbers> cut(std::size_t begin, std::size_t end, std::uint32_t group) const {
    Numbers packs =
        options_.method == Batching::none || options_.method == Batching::sorted
            ? Numbers()
            : shuffled(end - begin, options_.seed, stream_of("batch.packs") + stream_ + group);
    if (packs.empty()) {
      packs.resize(end - begin);
      std::iota(packs.begin(), packs.end(), 0u);
    }
    for (std::uint32_t& p : packs) p += static_cast<std::uint32_t>(begin);
    if (options_.method == Batching::hbp && options_.balance) {
      std::sort(packs.begin(), packs.end(), [&](std::uint32_t a, std::uint32_t b) {
        return squares_[a] != squares_[b] ? squares_[a] > squares_[b] : a < b;
      });
    }
    const std::size_t width = ranks() / static_cast<std::size_t>(groups_[group].ranks);
    std::vector<Numbers> list;
    for (std::size_t i = 0; i < packs.size(); i += width)
      list.emplace_back(
          packs.begin() + static_cast<std::ptrdiff_t>(i),
          packs.begin() + static_cast<std::ptrdiff_t>(std::min(packs.size(), i + width)));
    return list;
  }

  std::vector<Segment> segments(std::uint32_t pack) const {
    std::vector<Segment> list;
    list.reserve(packs_[pack].size());
    for (const std::uint32_t i : packs_[pack])
      list.push_back({samples_[i].sample, 0, samples_[i].tokens, samples_[i].loss_tokens});
    return list;
  }

  const Samples& samples_;
  const BatchingOptions& options_;
  std::uint64_t stream_;
  std::vector<PackGroup> groups_;
  Packing packs_;
  Numbers group_;                       ///< of each pack
  std::vector<double> cost_, squares_;  ///< of each pack
  bool aligned_ =
      false;  ///< some ranks share packs, so that every rank has an entry in every round
};

Batch plan_by_weight(std::int64_t step, const Samples& samples, const BatchingOptions& options) {
  require(
      options.method == Batching::lbb || options.sample_cost,
      "batching.method = \"sab\" needs predicted latency: name a profile.table, or state [costs]");
  // The answers of a pair do not see each other.
  const auto cost = [&](const SampleLength& s) {
    return s.chosen_tokens > 0 ? options.sample_cost(s.chosen_tokens) +
                                     options.sample_cost(s.tokens - s.chosen_tokens)
                               : options.sample_cost(s.tokens);
  };
  std::vector<double> weights;
  for (const SampleLength& s : samples)
    weights.push_back(options.method == Batching::lbb ? static_cast<double>(s.tokens) : cost(s));
  return plan_weighted(step, samples, weights, options);
}

/// Of a micro-batch; all but `balanced` give a longer sample one of its own.
std::int64_t most_tokens(const BatchingOptions& options) {
  int ranks = 1;
  if (options.method == Batching::balanced)
    for (const PlacementSplit& split : options.splits) ranks = std::max(ranks, split.ranks);
  return ranks * options.micro_batch_tokens;
}

/// What all methods have in common: padding, and pairs as documents of their own.
void finish(std::span<Batch> batches, const Samples& samples, const BatchingOptions& options) {
  for (Batch& batch : batches)
    for (auto& list : batch.micro_batches)
      for (MicroBatch& micro_batch : list) micro_batch.align = options.align;
  separate_pairs(batches, samples, most_tokens(options));
}

}  // namespace

Batch plan_batch(std::int64_t step, const std::vector<SampleLength>& samples,
                 const BatchingOptions& options) {
  const auto finished = [&](Batch batch) {
    finish({&batch, 1}, samples, options);
    return batch;
  };
  if (balances_by_weight(options.method)) return finished(plan_by_weight(step, samples, options));
  if (options.method == Batching::chunkflow) return finished(plan_chunks(step, samples, options));
  if (options.method == Batching::balanced) return finished(placed_batch(step, samples, options));
  const Planner planner(samples, options, static_cast<std::uint64_t>(step));
  Batch batch;
  batch.step = step;
  batch.micro_batches.resize(planner.ranks());
  if (planner.balanced() && (options.method == Batching::packed ||
                             (options.method == Batching::hbp && !planner.aligned()))) {
    planner.add_all(batch);
  } else if (options.method == Batching::hbp && planner.aligned()) {
    std::vector<double> load(planner.ranks());
    for (const Round& round : planner.rounds()) planner.add(batch, load, round);
  } else {
    planner.deal(batch);
  }
  return finished(std::move(batch));
}

Batch plan_placed(std::int64_t step, const Placement& placed,
                  const std::vector<SampleLength>& samples, const BatchingOptions& options) {
  Batch batch = batch_of(step, placed);
  finish({&batch, 1}, samples, options);
  return batch;
}

std::vector<Batch> plan_epoch(const std::vector<SampleLength>& samples,
                              const BatchingOptions& options) {
  require(packs_whole_samples(options.method),
          "batching.scope = \"epoch\" packs whole epochs; batching.method = \"{}\" plans steps",
          name(options.method));
  const Planner planner(samples, options, 0);
  const std::vector<Round> rounds = planner.rounds();
  const Numbers order = options.method == Batching::none
                            ? Numbers()
                            : shuffled(rounds.size(), options.seed, stream_of("batch.order"));
  std::vector<Batch> batches(rounds.size());
  for (std::size_t i = 0; i < rounds.size(); ++i) {
    batches[i].step = static_cast<std::int64_t>(i);
    batches[i].micro_batches.resize(planner.ranks());
    std::vector<double> load(planner.ranks());
    planner.add(batches[i], load, rounds[order.empty() ? i : order[i]]);
  }
  finish(batches, samples, options);
  return batches;
}

}  // namespace ballast
