// The batching method `balanced`: placement (core/plan/batch/placement) as a Batch of rounds.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/placement.hpp"

namespace ballast {

/// What placement gets of the options: groups are of adjacent ranks, aligned to their size, and no
/// rank holds more than micro_batch_tokens of a micro-batch.
PlacementOptions placement_options(const BatchingOptions& options);

/// One list of equal length for every rank of the placement.  Ranks that share a micro-batch have
/// it at the same place of their lists; a rank without work at a place has a micro-batch without
/// segments there.
Batch batch_of(std::int64_t step, const Placement& placed);

/// The batch of place().  Errors: no options.placement_costs, and those of place().
Batch placed_batch(std::int64_t step, const std::vector<SampleLength>& samples,
                   const BatchingOptions& options);

}  // namespace ballast
