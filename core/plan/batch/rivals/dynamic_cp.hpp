// Placement as dynamic context parallelism does it: a sample's length alone decides how many ranks
// share it, groups of different size stand side by side.
// Source: NVIDIA, "Speeding Up Variable-Length Training with Dynamic Context Parallelism and
// NVIDIA Megatron Core" (2026).
#pragma once
#include <vector>

#include "core/plan/batch/placement.hpp"

namespace ballast {

/// Every sample on the fewest ranks, 1, 2, 4, 8, ..., whose memory holds it, as one ring; the
/// longest first to the aligned block that is free first; samples of one rank packed there up to
/// micro_batch_tokens.  While ranks have nothing to do, the sample that takes longest gets twice as
/// many, unless the step ends later.  More generous than the source: work counts in predicted
/// seconds, and groups wait only for the ranks that they take over.
/// Errors: a sample that no group of a power of two holds.
Placement dynamic_cp_placement(const std::vector<SampleLength>& samples,
                               const PlacementOptions& options, const PlacementCosts& costs);

}  // namespace ballast
