#include "core/plan/batch/rivals/group_lists.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace ballast {

std::vector<PlacementSplit> powers_of_two(const PlacementOptions& options) {
  std::vector<PlacementSplit> list;
  for (const PlacementSplit& s : options.splits)
    if (std::has_single_bit(static_cast<unsigned>(s.ranks)) &&
        (list.empty() || list.back().ranks != s.ranks))
      list.push_back(s);
  return list;
}

std::int64_t most_tokens(const PlacementSplit& split, const PlacementOptions& options,
                         const PlacementCosts& costs) {
  const std::int64_t whole = options.micro_batch_tokens * split.ranks;
  if (options.memory_bytes <= 0) return whole;
  std::int64_t low = 0, high = whole + 1;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (costs.bytes(middle, 0, split) <= options.memory_bytes ? low : high) = middle;
  }
  return low;
}

int earliest_block(const std::vector<double>& end, int ranks) {
  int best = 0;
  double least = -1;
  for (int first = 0; first + ranks <= static_cast<int>(end.size()); first += ranks) {
    const double free = *std::max_element(end.begin() + first, end.begin() + first + ranks);
    if (least < 0 || free < least) best = first, least = free;
  }
  return best;
}

std::vector<Segment> whole(const SampleLength& sample) {
  return {{sample.sample, 0, sample.tokens, sample.loss_tokens}};
}

Placement in_order(std::vector<PlacedMicroBatch> micro_batches, const PlacementOptions& options,
                   const PlacementCosts& costs) {
  Placement placed;
  placed.micro_batches = std::move(micro_batches);
  placed.ranks.resize(static_cast<std::size_t>(options.ranks));
  std::vector<double> end(placed.ranks.size(), 0.0);
  double longest = 0;
  for (std::size_t id = 0; id < placed.micro_batches.size(); ++id) {
    PlacedMicroBatch& m = placed.micro_batches[id];
    m.seconds = seconds(m.segments, m.split, costs, options.align);
    longest = std::max(longest, m.seconds);
    const auto first = end.begin() + m.first, last = first + m.split.ranks;
    std::fill(first, last, *std::max_element(first, last) + m.seconds);
    for (int r = m.first; r < m.first + m.split.ranks; ++r)
      placed.ranks[static_cast<std::size_t>(r)].push_back(static_cast<int>(id));
    for (const Segment& s : m.segments)
      placed.bound_s += seconds({s}, options.splits.front(), costs, options.align) *
                        options.splits.front().ranks / options.ranks;
  }
  placed.step_s = *std::max_element(end.begin(), end.end()) + (options.stages - 1) * longest;
  return placed;
}

}  // namespace ballast
