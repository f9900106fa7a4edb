// What placements planned for comparison have in common: groups of 2^k adjacent ranks, aligned to
// their size.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/batch/placement.hpp"

namespace ballast {

/// The splits of 1, 2, 4, 8, ... ranks among options.splits.
std::vector<PlacementSplit> powers_of_two(const PlacementOptions& options);

/// Most tokens of a micro-batch on `split`: as many as its ranks' memory holds, and no more than
/// micro_batch_tokens for each of its ranks.
std::int64_t most_tokens(const PlacementSplit& split, const PlacementOptions& options,
                         const PlacementCosts& costs);

/// First of the `ranks` aligned adjacent ranks that are free first; of several the lowest.
/// `end`: of every rank.
int earliest_block(const std::vector<double>& end, int ranks);

/// Segments of a sample that is not cut.
std::vector<Segment> whole(const SampleLength& sample);

/// Micro-batches in the order in which their ranks run them, with predicted seconds.
Placement in_order(std::vector<PlacedMicroBatch> micro_batches, const PlacementOptions& options,
                   const PlacementCosts& costs);

}  // namespace ballast
