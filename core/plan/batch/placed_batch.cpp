#include "core/plan/batch/placed_batch.hpp"

#include <algorithm>

#include "core/base/error.hpp"

namespace ballast {

PlacementOptions placement_options(const BatchingOptions& options) {
  PlacementOptions placement;
  placement.ranks = options.dp;
  placement.splits = options.splits;
  placement.aligned = true;
  placement.micro_batch_tokens = std::max(options.align, options.micro_batch_tokens);
  placement.memory_bytes = static_cast<double>(placement.micro_batch_tokens);
  placement.stages = options.stages;
  placement.align = options.align;
  placement.chunk_align = options.chunk_align;
  placement.chunk_k = options.chunk_k;
  return placement;
}

Batch batch_of(std::int64_t step, const Placement& placed) {
  Batch batch;
  batch.step = step;
  batch.micro_batches.resize(placed.ranks.size());
  auto& lists = batch.micro_batches;
  for (const PlacedMicroBatch& m : placed.micro_batches) {
    const auto first = lists.begin() + m.first, last = first + m.split.ranks;
    std::size_t round = 0;
    for (auto list = first; list != last; ++list) round = std::max(round, list->size());
    for (auto list = first; list != last; ++list) {
      list->resize(round);
      list->push_back({{}, m.split.ranks});
    }
    first->back().segments = m.segments;
  }
  std::size_t longest = 0;
  for (const auto& list : lists) longest = std::max(longest, list.size());
  for (auto& list : lists) list.resize(longest);
  return batch;
}

Batch placed_batch(std::int64_t step, const std::vector<SampleLength>& samples,
                   const BatchingOptions& options) {
  require(options.placement_costs != nullptr,
          "batching.method = \"balanced\" needs costs to place by");
  return batch_of(step, place(samples, placement_options(options), *options.placement_costs));
}

}  // namespace ballast
