// StepPlan: all that one training step does on all ranks, as one symbolic value.  `train` executes
// it, `check`, `pack`, `plan` and the search simulate it, the trace stores it, the report reads it.
//
// A lane is (data-parallel rank, pipeline stage).  The tensor-, context- and sequence-parallel
// ranks inside a lane follow by rule and are not listed.  What many lanes have in common
// (schedules, layouts, rings) stands once and is referred to by its place in a list.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/loss_weights.hpp"
#include "core/plan/context/context_split.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "core/plan/pipeline/schedule.hpp"

namespace ballast {

/// Adjacent data-parallel ranks [first, first + ranks) that work on one micro-batch together.
struct RankGroup {
  int first = 0, ranks = 1;
  bool holds(int dp) const { return dp >= first && dp < first + ranks; }
  bool operator==(const RankGroup&) const = default;
};

/// Dynamic sparsity tuning of one micro-batch (SparseBalance Algorithm 1), known before it runs.
struct TuningTarget {
  std::int64_t base_budget = 0;    ///< in the pattern's unit; 0: the pattern has no budget
  std::int64_t anchor_budget = 0;  ///< the largest candidate within the anchor
  bool above_anchor = false;       ///< a straggler at the base budget
  bool operator==(const TuningTarget&) const = default;
};

/// One micro-batch of the step; its id is its place in StepPlan::micro_batches.
struct PlannedMicroBatch {
  std::vector<Segment> segments;  ///< never empty
  RankGroup group;
  ContextSplit split;
  int layout = 0;  ///< place in StepPlan::layouts
  /// Which micro-batches of the data-parallel ranks belong together: every rank has one, or none,
  /// in each round.  With collectives by round each rank's backwards end with rounds ascending.
  int round = 0;
  int chunk = 0;              ///< index of a dependent chunk inside its sample, 0 for standalone
  int recompute_layers = -1;  ///< layers recomputed in backward; -1: as the deck says
  std::int64_t align = 1;     ///< as MicroBatch::align
  double loss_weight =
      0;  ///< of every token in the objective, times its segment's (segment_weights)
  TuningTarget tuning;
  bool operator==(const PlannedMicroBatch&) const = default;

  /// As batching sees it, without its place.
  MicroBatch micro_batch() const;
  std::int64_t axis_tokens() const;  ///< as MicroBatch::axis_tokens
};

/// What all replicas of a stage do together, beside the transfers of schedules and micro-batches.
enum class CollectiveKind { gradient_reduce, tied_sum, gradient_norm, optimizer, parameter_gather };
const char* name(CollectiveKind kind);

/// One collective of the step, in the order of the list on every rank.  `after_round`: it runs at
/// the schedules' OpKind::collective of that round (ZeRO 2); -1: it follows the last op of the
/// step.
struct PlannedCollective {
  CollectiveKind kind = CollectiveKind::gradient_reduce;
  int stage = 0;
  int after_round = -1;
  std::int64_t elements = 0;  ///< parameters of the stage that take part
  bool operator==(const PlannedCollective&) const = default;
};

/// What a data-parallel rank does: its micro-batches and the schedule of its pipeline over them.
/// Op::micro_batch of the schedule is a place in `micro_batches` of the lane, not an id, so that
/// lanes with like lists share a schedule.
struct PlannedLane {
  std::vector<int> micro_batches;  ///< ids, in the order of the rank's list
  int schedule = 0;                ///< place in StepPlan::schedules
  bool operator==(const PlannedLane&) const = default;
};

struct StepPlan {
  std::int64_t step = 0;
  MeshShape mesh;
  int ep = 1;            ///< ranks that experts are spread over
  int zero = 0;          ///< what the optimizer shards
  bool backward = true;  ///< false: forward ops alone, as evaluation takes them
  LossNormaliser normaliser = LossNormaliser::ave_token;
  std::int64_t loss_tokens = 0;  ///< of the global batch
  /// First layer of every pipeline stage.
  std::vector<std::int64_t> layer_begin{0};
  std::vector<LayoutRule> layouts;
  std::vector<PlannedMicroBatch> micro_batches;
  std::vector<Schedule> schedules;
  std::vector<PlannedLane> lanes;  ///< [dp]
  std::vector<PlannedCollective> collectives;

  /// Whether gradients are reduced after every round, not once at the end.
  bool reduces_by_round() const { return zero >= 2 && backward; }
  /// Whether the data-parallel ranks of a stage may wait for one another inside their backwards
  /// (ends_gradients), not after them alone: where ranks that share micro-batches have all of them
  /// in common (with other lists a rank could wait for one that waits for it in a micro-batch), and
  /// where they are in step.  A reduction that waits for a rank elsewhere holds processors of the
  /// GPU that other kernels count on: steps were a third longer.  ZeRO 2 meets all the same, to
  /// save memory.
  bool meets_in_backward() const;
  /// Whether the data-parallel ranks have lists of micro-batches that take about the same time,
  /// place by place.
  bool lanes_in_step() const;
  const Schedule& schedule(int dp) const;
  const PlannedMicroBatch& micro_batch(int dp, int place) const;
  /// Layout of a micro-batch's packed axis over its ring.
  SequenceLayout layout(const PlannedMicroBatch& micro_batch) const;
  /// The list of one data-parallel rank, as executors and costs take it: whole micro-batches, also
  /// those that it shares with other ranks.
  std::vector<MicroBatch> list(int dp) const;
  /// Rounds of the step: 1 + the last PlannedMicroBatch::round, 0 without any.
  int rounds() const;
  std::int64_t tokens() const;
  double attention_pairs() const;
  /// Samples that begin in this step.
  std::int64_t samples() const;
  /// Data-parallel ranks without any micro-batch in this step.
  int idle_lanes() const;
  /// Order-sensitive 64-bit hash of every field.
  std::uint64_t hash() const;
};

}  // namespace ballast
