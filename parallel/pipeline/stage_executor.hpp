// Stage executor: walks this stage's list of a Schedule, op by op, and records each op under the
// plan's identifiers.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/pipeline/schedule.hpp"
#include "kernels/model/stage_model.hpp"
#include "parallel/context/ring_buffers.hpp"
#include "parallel/pipeline/pipeline_links.hpp"

namespace ballast {

/// What one micro-batch needs on this rank; made when its first op runs and dropped after its last
/// one.
struct MicroBatchWork {
  LocalBatch batch;
  std::unique_ptr<AttentionExecutor> attention;
};

struct StageCallbacks {
  std::function<MicroBatchWork(int micro_batch)> prepare;
  /// Runs the collectives of a round, where the schedule has OpKind::collective (ZeRO 2 reduces the
  /// gradients that are complete by then).
  std::function<void(int round)> collective;
  /// Takes the output of each micro-batch's forward on the last stage (evaluation), in place of
  /// summing its loss; may be empty.
  std::function<void(int micro_batch, const LocalBatch& batch, const StageOutput& output)> output;
  RingBuffers* host = nullptr;  ///< lends host memory for chunk inputs that a schedule puts away
  /// Told what is final while the backwards of ends_gradients() run; may be empty.
  GradientsFinal gradients_final = {};
};

/// Sum over this rank's tokens of loss weight x loss (LocalBatch::loss_weights) per micro-batch; 0
/// on stages before the last.
using MicroBatchLosses = std::vector<double>;

/// Runs the list of stage links.stage() for `micro_batches` micro-batches.  Sends are posted and
/// completed later; on the host, where a message moves while ranks wait, receives are posted before
/// the computation that precedes them.  A forward without a later backward (evaluation) or with a
/// recompute keeps no activations.  Throws Error for a list that asks for what is not there
/// (core/plan/pipeline/schedule's problems() finds it beforehand).
MicroBatchLosses run_stage(const Schedule& schedule, int micro_batches, StageModel& model,
                           const PipelineLinks& links, const StageCallbacks& callbacks,
                           Recorder* recorder);

/// Diagnosis after a NaN or Inf loss: forwards micro-batch `micro_batch` once more through all
/// stages and returns the first layer of the model whose output is not finite on this rank's
/// tokens, or -1; the same on every stage.  Collective over the stages and the context-parallel
/// ranks.
int first_nonfinite_layer(MicroBatchWork& work, StageModel& model, const PipelineLinks& links);

/// The event kind that reports an op.
EventKind event_kind(OpKind kind);

}  // namespace ballast
