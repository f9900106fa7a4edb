// Placement as workload-balanced packing does it on a fixed mesh: every micro-batch on groups of
// one size, packs of different length and equal work.
// Source: "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training" (OSDI
// 2025).
#pragma once
#include <vector>

#include "core/plan/batch/placement.hpp"

namespace ballast {

/// As many micro-batches as tokens need, alike for every group of `split`; documents, the longest
/// first, each to the micro-batch with the least predicted work whose memory still holds it; then
/// the heaviest micro-batch to the group with the least.  Shards by document are the layout's,
/// which the clock chooses for each micro-batch.  The queue that delays outliers to later steps is
/// left out: the deck's window moves samples for every method alike. Errors: a sample that a group
/// of `split` does not hold; a row that `split` does not divide.
Placement wlb_llm_placement(const std::vector<SampleLength>& samples,
                            const PlacementOptions& options, const PlacementSplit& split,
                            const PlacementCosts& costs);

}  // namespace ballast
