// Stage executor: walks this stage's list of a Schedule, op by op, and records each op under the plan's identifiers.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "core/attention_executor.hpp"
#include "core/recorder.hpp"
#include "core/schedule.hpp"
#include "kernels/model.hpp"

namespace ballast {

/// What one micro-batch needs on this rank; made when its first op runs and dropped after its backward.
struct MicroBatchWork {
  LocalBatch batch;
  std::unique_ptr<AttentionExecutor> attention;
  double loss_scale = 1;  ///< derivative of the objective with respect to a token's loss
};

struct StageCallbacks {
  std::function<MicroBatchWork(int micro_batch)> prepare;
  /// Called after the parameter gradients of a micro-batch are complete (ZeRO-2 reduces them here).
  std::function<void()> gradients_ready;
};

/// Summed token loss of this rank's tokens per micro-batch.
using MicroBatchLosses = std::vector<double>;

/// Runs `ops` (one stage of a Schedule without transfers) for `micro_batches` micro-batches.  Throws Error for an op
/// that a single stage cannot have.
MicroBatchLosses run_stage(const std::vector<Op>& ops, int micro_batches, StageModel& model, const StageCallbacks& callbacks, Recorder* recorder);

/// The event kind that reports an op.
EventKind event_kind(OpKind kind);

}  // namespace ballast
