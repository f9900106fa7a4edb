// plan_step: the only place that decides what one training step does.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/context/layout_balance.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/step_plan.hpp"

namespace ballast {

/// What a step's plan depends on beside its samples.  Functions may be empty.
struct StepOptions {
  MeshShape mesh;
  int zero = 0;
  LossNormaliser normaliser = LossNormaliser::ave_token;
  LayoutChoice layout;
  BatchingOptions batching;  ///< dp is the mesh's
  PipelineOptions pipeline;  ///< stages are the mesh's
  std::vector<std::int64_t> layer_begin{0};
  std::vector<std::int64_t> stage_elements{0};  ///< trainable parameters of every stage
  std::int64_t tied_elements = 0;  ///< of the embedding that the first and the last stage share
  std::int64_t query_heads = 0;    ///< of the model; 0: any number of ranks shares them
  /// How the ranks of a micro-batch share it; empty: joined_split.
  std::function<ContextSplit(const MicroBatch&)> split;
  /// Exact loss tokens of every segment, where the weights of the normaliser need them.
  std::function<void(Batch&)> count_loss_tokens;
  /// Targets of dynamic sparsity tuning by id, of a plan without schedules.
  std::function<std::vector<TuningTarget>(const StepPlan&)> tuning;
  /// Targets in place of those, of the whole plan but its collectives.
  std::function<std::vector<TuningTarget>(const StepPlan&)> retuning;
  /// Costs by id that state-aware schedules are built by; empty: pipeline.costs.
  std::function<ScheduleCosts(const StepPlan&)> costs;
};

/// The step that trains on these samples.  A function of its arguments alone.  Micro-batch ids
/// follow the places in the lists of data-parallel ranks, then the ranks.
/// Errors: those of plan_batch and plan_schedule.
StepPlan plan_step(std::int64_t step, const std::vector<SampleLength>& samples,
                   const StepOptions& options);

/// The forward pass over these samples: no backward, no collectives.  Its step is -1.
StepPlan plan_evaluation(const std::vector<SampleLength>& samples, const StepOptions& options);

/// The plan of a batch that is given, such as one of an epoch packed at once (plan_epoch).
StepPlan plan_batch_step(const Batch& batch, const StepOptions& options);

/// The plan of a placement of `samples` that is given: every micro-batch split as it says, rings
/// flat.  `placed` has as many ranks as the mesh has data-parallel ones, and these join no others
/// (sp and cp 1).
StepPlan plan_placement_step(std::int64_t step, const Placement& placed,
                             const std::vector<SampleLength>& samples, const StepOptions& options);

}  // namespace ballast
