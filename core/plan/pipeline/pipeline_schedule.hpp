// Pipeline schedules as plans, by name (pipeline.schedule): GPipe, 1F1B, and those of
// state_aware_schedule.hpp, for micro-batches of any lengths and dependent chunks.  Sources: GPipe
// (Huang et al. 2019), 1F1B (Narayanan et al. 2021).
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/schedule.hpp"

namespace ballast {

/// Messages of one payload that a stage may be ahead of its neighbour's receives.  A transport may
/// make the sender's host wait beyond that (parallel/comm/nccl_group.cpp does), so every schedule
/// here runs with this many.
inline constexpr std::size_t kTransfersAhead = 8;

/// All forwards, then all backwards in reverse.
Schedule gpipe_schedule(const ChunkGroups& groups, int stages);

/// 1F1B in the given order: stage s runs P - 1 - s forwards ahead.  A group's activations are all
/// kept, so stage s holds at most (longest group) + P - 1 - s.
Schedule one_f_one_b_schedule(const ChunkGroups& groups, int stages);

/// Every forward in order, nothing else: evaluation.
Schedule forward_schedule(const ChunkGroups& groups, int stages);

/// Forward and backward times of a stage, affine in tokens and visible pairs; all stages alike.
struct PipelineCosts {
  double token_s = 1, pair_s = 0;  ///< forward of one token, of one visible (query, key) pair
  double micro_batch_s =
      0;  ///< forward of a micro-batch beside them: launches, kernels too small to fill the device
  double backward_over_forward = 2;
  double weight_share =
      0.5;                 ///< of a token's backward that computes weight gradients (weight_share()
                           ///< of core/plan/pipeline/stage_balance); attention has none
  double hop_token_s = 0;  ///< one token's activations or gradients to the neighbour stage
};
ScheduleCosts schedule_costs(const PipelineCosts& costs, const std::vector<MicroBatch>& list);

/// `automatic` is a deck's word for state_aware_1f1b where batching cuts dependent chunks, else
/// 1f1b; PipelineOptions have the others alone.
enum class ScheduleKind { gpipe, one_f_one_b, state_aware_1f1b, zero_bubble, automatic };
template <>
struct EnumNames<ScheduleKind> {
  static constexpr EnumTable<ScheduleKind, 5> table{
      {{ScheduleKind::gpipe, "gpipe"},
       {ScheduleKind::one_f_one_b, "1f1b"},
       {ScheduleKind::state_aware_1f1b, "state_aware_1f1b"},
       {ScheduleKind::zero_bubble, "zero_bubble"},
       {ScheduleKind::automatic, "auto"}}};
};

/// Where stored keys, values, their gradients and chunk inputs lie.
enum class Offload { none, host };
template <>
struct EnumNames<Offload> {
  static constexpr EnumTable<Offload, 2> table{{{Offload::none, "none"}, {Offload::host, "host"}}};
};

struct PipelineOptions {
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  int stages = 1;
  int k = 1, search = 64;  ///< of state_aware_1f1b and zero_bubble
  bool offload = false;    ///< stored chunk inputs wait in host memory
  PipelineCosts costs;
};
/// Whether a schedule bounds live chunks by k: of a sample of N > k chunks the first N - k are
/// recomputed.
inline bool state_aware(ScheduleKind schedule) {
  return schedule == ScheduleKind::state_aware_1f1b || schedule == ScheduleKind::zero_bubble;
}

/// Adds the ops that put the input of a chunk away after a forward that keeps nothing, and bring it
/// back for its recompute; the first stage has tokens in its place.  They start copies, which run
/// beside the computation that follows in the list: a fetch stands one computation ahead of its
/// recompute.
Schedule with_offload(const Schedule& schedule);

/// The Schedule of one data-parallel rank's list.  Errors: those above.
Schedule plan_schedule(const std::vector<MicroBatch>& list, const PipelineOptions& options);
/// The same against other costs than the stated ones, such as measured times: what state-aware
/// schedules are built by.
Schedule plan_schedule(const std::vector<MicroBatch>& list, const PipelineOptions& options,
                       const ScheduleCosts& costs);

}  // namespace ballast
