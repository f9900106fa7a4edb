// ChunkFlow's state-aware 1F1B and its zero-bubble variant.  Sources: ChunkFlow Sections 4.2
// and 4.3, Algorithm 2; Qi et al. 2024.
#pragma once
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/schedule.hpp"

namespace ballast {

/// State-aware 1F1B: at most k + P - 1 - s live activations at stage s.  Of a group of N > k chunks
/// the first N - k are forwarded without keeping activations and recomputed from the stage's
/// stored chunk input just before or while their gradient is awaited, without the neighbour stages.
/// Built by list scheduling against `costs`: at each moment the stage that can begin first
/// takes a backward whose gradient is there, a recompute, or the next forward that a free slot
/// admits.  All stages take groups in one order, and a group with chunks to recompute hands its
/// slot from chunk to chunk, so there is always a stage that can go on.  The order of groups is
/// searched (`search` orders at most, fewer of very many micro-batches; a function of the arguments
/// alone), the shortest step wins; 1 keeps the given order. `split`: the zero-bubble variant (Qi et
/// al. 2024, ZB-H1, for any lengths and dependent chunks).  Backward is an input half, which alone
/// the stage before waits for, and a weight half that fills what would be waits.  A weight half
/// still to come holds as much as a forward's activations (StageModel::backward_input): stage s
/// holds at most k + P - 1 - s chunks between forward and input half, and at most k + P - 1 with
/// the waiting halves, as many as the first stage holds anyway.  Halves that follow each other
/// directly are one backward; weight halves come in the order of their input halves.  Orders that
/// gain nothing by halves keep whole backwards. Errors: k < 1, stages < 1, a group without
/// micro-batches.
Schedule state_aware_schedule(const ChunkGroups& groups, int stages, int k,
                              const ScheduleCosts& costs, int search = 64, bool split = false);

}  // namespace ballast
