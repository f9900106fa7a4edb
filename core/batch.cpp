#include "core/batch.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>

#include "core/error.hpp"
#include "core/hash.hpp"

namespace ballast {

std::int64_t MicroBatch::tokens() const {
  std::int64_t sum = 0;
  for (const auto& s : segments) sum += s.tokens();
  return sum;
}

std::int64_t MicroBatch::loss_tokens() const {
  std::int64_t sum = 0;
  for (const auto& s : segments) sum += s.loss_tokens;
  return sum;
}

double MicroBatch::attention_pairs() const {
  double sum = 0;
  for (const auto& s : segments) {
    const double n = static_cast<double>(s.tokens());
    sum += n * static_cast<double>(s.begin) + n * (n + 1) / 2;
  }
  return sum;
}

namespace {
template <class F> std::int64_t total(const Batch& batch, F&& of) {
  std::int64_t sum = 0;
  for (const auto& list : batch.micro_batches)
    for (const auto& mb : list) sum += of(mb);
  return sum;
}
}  // namespace

std::int64_t Batch::loss_tokens() const {
  return total(*this, [](const MicroBatch& mb) { return mb.loss_tokens(); });
}

std::int64_t Batch::tokens() const {
  return total(*this, [](const MicroBatch& mb) { return mb.tokens(); });
}

std::int64_t Batch::samples() const {
  return total(*this, [](const MicroBatch& mb) {
    return std::count_if(mb.segments.begin(), mb.segments.end(), [](const Segment& s) { return s.begin == 0; });
  });
}

std::uint64_t Batch::hash() const {
  Hash h;
  h.add(step);
  for (const auto& list : micro_batches) {
    h.add(list.size());
    for (const auto& mb : list) {
      h.add(mb.segments.size()).add(mb.sp).add(mb.recompute_layers);
      for (const auto& s : mb.segments) h.add(s.sample).add(s.begin).add(s.end).add(s.loss_tokens);
    }
  }
  return h.value();
}

namespace {

/// Best-fit decreasing: every sample goes into the fullest pack that still holds it.  O(n log n).
std::vector<MicroBatch> best_fit_decreasing(const std::vector<SampleLength>& samples, std::int64_t capacity) {
  std::vector<std::size_t> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return samples[a].tokens > samples[b].tokens; });
  std::vector<MicroBatch> packs;
  std::multimap<std::int64_t, std::size_t> open;  // room left -> pack
  for (std::size_t i : order) {
    const auto& s = samples[i];
    std::size_t pack = packs.size();
    std::int64_t room = capacity;
    if (auto fit = open.lower_bound(s.tokens); fit != open.end()) {
      room = fit->first;
      pack = fit->second;
      open.erase(fit);
    } else {
      packs.emplace_back();
    }
    packs[pack].segments.push_back({s.sample, 0, s.tokens, s.loss_tokens});
    if (room > s.tokens) open.emplace(room - s.tokens, pack);
  }
  return packs;
}

}  // namespace

Batch plan_batch(std::int64_t step, const std::vector<SampleLength>& samples, const BatchingOptions& options) {
  require(options.dp >= 1, "mesh.dp = {}: a batch needs at least one data-parallel rank", options.dp);
  Batch batch;
  batch.step = step;
  batch.micro_batches.resize(options.dp);
  if (options.method == "none") {
    for (std::size_t i = 0; i < samples.size(); ++i)
      batch.micro_batches[i % options.dp].push_back({{{samples[i].sample, 0, samples[i].tokens, samples[i].loss_tokens}}});
    return batch;
  }
  require(options.method == "packed", "batching.method = \"{}\" is unknown; allowed: none, packed", options.method);
  require(options.micro_batch_tokens >= 1, "batching.micro_batch_tokens = {} must be at least 1", options.micro_batch_tokens);
  auto packs = best_fit_decreasing(samples, options.micro_batch_tokens);
  std::vector<double> cost(packs.size());
  for (std::size_t i = 0; i < packs.size(); ++i)
    cost[i] = static_cast<double>(packs[i].tokens()) + options.pair_cost_tokens * packs[i].attention_pairs();
  std::vector<std::size_t> order(packs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  // Longest processing time first: the heaviest pack goes to the least loaded rank, ties to the lower rank.
  using Load = std::pair<double, int>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> load;
  for (int d = 0; d < options.dp; ++d) load.emplace(0.0, d);
  for (std::size_t i : order) {
    auto [sum, d] = load.top();
    load.pop();
    batch.micro_batches[d].push_back(std::move(packs[i]));
    load.emplace(sum + cost[i], d);
  }
  return batch;
}

}  // namespace ballast
