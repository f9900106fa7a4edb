#include "core/plan/batch/chunking.hpp"

#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/batch/packing.hpp"

namespace ballast {
namespace {

using Bins = std::vector<std::vector<std::uint32_t>>;

constexpr std::size_t kSearchedItems = 64;
constexpr int kSearchedNodes = 200000;

/// Depth-first search for a packing into a fixed number of bins, longest first.
class BinSearch {
 public:
  BinSearch(std::span<const std::int64_t> lengths, std::span<const std::uint32_t> order,
            std::int64_t capacity, std::size_t bins)
      : lengths_(lengths), order_(order), room_(bins, capacity), bins_(bins) {}

  bool run() { return place(0); }
  const Bins& bins() const { return bins_; }

 private:
  bool place(std::size_t at) {
    if (at == order_.size()) return true;
    if (++nodes_ > kSearchedNodes) return false;
    const std::int64_t n = lengths_[order_[at]];
    for (std::size_t b = 0; b < room_.size(); ++b) {
      if (room_[b] < n) continue;
      // Bins with the same room are alike, so one of them stands for all.
      if (std::find(room_.begin(), room_.begin() + static_cast<std::ptrdiff_t>(b), room_[b]) !=
          room_.begin() + static_cast<std::ptrdiff_t>(b))
        continue;
      const bool exact = room_[b] == n;
      room_[b] -= n;
      bins_[b].push_back(order_[at]);
      if (place(at + 1)) return true;
      bins_[b].pop_back();
      room_[b] += n;
      if (exact) return false;  // an exact fit is never worse than another place
    }
    return false;
  }

  std::span<const std::int64_t> lengths_;
  std::span<const std::uint32_t> order_;
  std::vector<std::int64_t> room_;
  Bins bins_;
  int nodes_ = 0;
};

}  // namespace

std::int64_t least_bins(std::span<const std::int64_t> lengths, std::int64_t capacity) {
  require(capacity >= 1, "chunks of {} tokens; must be at least 1", capacity);
  std::vector<std::int64_t> sorted(lengths.begin(), lengths.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::int64_t> sums(sorted.size() + 1, 0);
  std::partial_sum(sorted.begin(), sorted.end(), sums.begin() + 1);
  const auto below = [&](std::int64_t length) {  // how many are shorter
    return static_cast<std::size_t>(std::lower_bound(sorted.begin(), sorted.end(), length) -
                                    sorted.begin());
  };
  std::int64_t least = 0;
  // With a threshold a: lengths above capacity - a have a bin each that takes nothing of a or more;
  // those above half have one each, and what is left of lengths in [a, half] goes into their rooms
  // and further bins.  The lengths up to half are the thresholds that matter.
  const std::size_t half = below(capacity / 2 + 1);
  std::int64_t previous = -1;
  for (std::size_t i = 0; i <= half && i < sorted.size(); ++i) {
    const std::int64_t a = i == half ? 0 : sorted[i];
    if (a == previous) continue;
    previous = a;
    const std::size_t small = below(a), large = below(capacity - a + 1);
    const auto bins = static_cast<std::int64_t>(sorted.size() - half);
    const std::int64_t rooms =
        static_cast<std::int64_t>(large - half) * capacity - (sums[large] - sums[half]);
    const std::int64_t rest = sums[half] - sums[std::min(small, half)] - rooms;
    least = std::max(least, bins + (rest > 0 ? (rest + capacity - 1) / capacity : 0));
  }
  return std::max<std::int64_t>(
      least,
      sorted.empty() ? 0 : std::max<std::int64_t>(1, (sums.back() + capacity - 1) / capacity));
}

Bins fewest_bins(std::span<const std::int64_t> lengths, std::int64_t capacity) {
  require(capacity >= 1, "chunks of {} tokens; must be at least 1", capacity);
  for (const std::int64_t n : lengths)
    require(n >= 0 && n <= capacity, "a length of {} tokens does not fit a chunk of {}", n,
            capacity);
  const std::vector<std::uint32_t> all = longest_first(lengths);
  const auto empty =
      std::find_if(all.begin(), all.end(), [&](std::uint32_t i) { return lengths[i] == 0; });
  const std::span order(all.begin(), empty);
  Bins bins;
  BestFit fit(capacity);
  for (const std::uint32_t i : order) {
    const std::size_t b = fit.place(lengths[i]);
    if (b == bins.size()) bins.emplace_back();
    bins[b].push_back(i);
  }
  if (order.size() <= kSearchedItems)
    for (auto count = static_cast<std::size_t>(least_bins(lengths, capacity)); count < bins.size();
         ++count) {
      BinSearch search(lengths, order, capacity, count);
      if (!search.run()) continue;
      bins = search.bins();
      break;
    }
  if (bins.empty() && empty != all.end()) bins.emplace_back();
  if (empty != all.end()) bins.front().insert(bins.front().end(), empty, all.end());
  return bins;
}

std::vector<Segment> cut_sample(const SampleLength& s, std::int64_t chunk_tokens) {
  require(s.tokens >= 0, "sample {} has {} tokens", s.sample, s.tokens);
  if (s.tokens <= chunk_tokens) return {{s.sample, 0, s.tokens, s.loss_tokens}};
  require(chunk_tokens >= 1, "chunk.tokens = {} must be at least 1", chunk_tokens);
  const bool all_but_last = s.loss_tokens == s.tokens - 1;  // without a mask
  const auto loss_before = [&](std::int64_t token) {
    if (all_but_last) return std::min(token, s.loss_tokens);
    return static_cast<std::int64_t>(static_cast<long double>(s.loss_tokens) *
                                     static_cast<long double>(token) /
                                     static_cast<long double>(s.tokens));
  };
  std::vector<Segment> pieces;
  for (std::int64_t begin = 0; begin < s.tokens; begin += chunk_tokens) {
    const std::int64_t end = std::min(s.tokens, begin + chunk_tokens);
    const std::int64_t loss_end = end == s.tokens ? s.loss_tokens : loss_before(end);
    pieces.push_back({s.sample, begin, end, loss_end - loss_before(begin)});
  }
  return pieces;
}

std::vector<MicroBatch> construct_chunks(const std::vector<SampleLength>& samples,
                                         std::int64_t chunk_tokens, std::int64_t align) {
  require(chunk_tokens >= 1, "chunk.tokens = {} must be at least 1", chunk_tokens);
  std::vector<MicroBatch> chunks;
  std::vector<std::int64_t> lengths;
  std::vector<std::uint32_t> short_samples;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const SampleLength& s = samples[i];
    require(s.tokens >= 0, "sample {} has {} tokens", s.sample, s.tokens);
    if (s.tokens <= chunk_tokens) {
      lengths.push_back(std::min(chunk_tokens, axis_tokens(s, align)));
      short_samples.push_back(static_cast<std::uint32_t>(i));
      continue;
    }
    for (Segment& piece : cut_sample(s, chunk_tokens)) chunks.push_back({{piece}});
  }
  if (lengths.empty()) return chunks;
  Bins bins = fewest_bins(lengths, chunk_tokens);
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  std::sort(bins.begin(), bins.end());
  for (const auto& bin : bins) {
    MicroBatch& chunk = chunks.emplace_back();
    for (const std::uint32_t i : bin) {
      const SampleLength& s = samples[short_samples[i]];
      chunk.segments.push_back({s.sample, 0, s.tokens, s.loss_tokens});
    }
  }
  return chunks;
}

Batch plan_chunks(std::int64_t step, const std::vector<SampleLength>& samples,
                  const BatchingOptions& options) {
  require(options.dp >= 1, "mesh.dp = {}: a batch needs at least one data-parallel rank",
          options.dp);
  std::vector<MicroBatch> chunks =
      construct_chunks(samples, options.micro_batch_tokens, options.align);
  Batch batch;
  batch.step = step;
  batch.micro_batches.resize(options.dp);
  const ChunkGroups groups = chunk_groups(chunks);
  std::vector<double> cost(groups.size(), 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const int m : groups[g])
      cost[g] += static_cast<double>(chunks[m].tokens()) +
                 options.pair_cost_tokens * chunks[m].attention_pairs();
  std::vector<std::size_t> order(groups.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  using Load = std::pair<double, int>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> load;
  for (int d = 0; d < options.dp; ++d) load.emplace(0.0, d);
  std::vector<int> rank(groups.size());
  for (const std::size_t g : order) {
    const auto [sum, d] = load.top();
    load.pop();
    rank[g] = d;
    load.emplace(sum + cost[g], d);
  }
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const int m : groups[g]) batch.micro_batches[rank[g]].push_back(std::move(chunks[m]));
  return batch;
}

}  // namespace ballast
