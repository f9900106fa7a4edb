#include "parallel/stage_executor.hpp"

#include <optional>

namespace ballast {
namespace {

/// A micro-batch between its forward and its backward.
struct Live {
  MicroBatchWork work;
  StageActivationsPtr saved;
};

}  // namespace

EventKind event_kind(OpKind kind) {
  switch (kind) {
    case OpKind::forward: return EventKind::forward;
    case OpKind::recompute: return EventKind::recompute;
    case OpKind::backward: return EventKind::backward;
    case OpKind::backward_input: return EventKind::backward_input;
    case OpKind::backward_weight: return EventKind::backward_weight;
    case OpKind::send: return EventKind::send;
    case OpKind::recv: return EventKind::recv;
    case OpKind::offload: return EventKind::offload;
    case OpKind::fetch: return EventKind::fetch;
  }
  return EventKind::idle;
}

MicroBatchLosses run_stage(const std::vector<Op>& ops, int micro_batches, StageModel& model, const StageCallbacks& callbacks, Recorder* recorder) {
  std::vector<StageOutput> outputs(micro_batches);
  std::vector<std::optional<Live>> live(micro_batches);
  for (const Op& op : ops) {
    if (recorder) {
      recorder->context.micro_batch = op.micro_batch;
      recorder->context.chunk = op.chunk;
    }
    auto& slot = live.at(op.micro_batch);
    switch (op.kind) {
      case OpKind::forward: {
        if (!slot) {
          Scope data(recorder, EventKind::data);
          slot.emplace(Live{callbacks.prepare(op.micro_batch), nullptr});
        }
        Scope scope(recorder, event_kind(op.kind));
        outputs[op.micro_batch] = model.forward(slot->work.batch, Tensor(), *slot->work.attention, &slot->saved);
        break;
      }
      case OpKind::backward: {
        require(slot && slot->saved, "schedule: backward of micro-batch {} before its forward", op.micro_batch);
        {
          Scope scope(recorder, event_kind(op.kind));
          model.backward(slot->work.batch, std::move(slot->saved), *slot->work.attention, slot->work.loss_scale, Tensor());
        }
        slot.reset();
        callbacks.gradients_ready();
        break;
      }
      default: fail("schedule: a single stage cannot run {} of micro-batch {}", name(op.kind), op.micro_batch);
    }
  }
  if (recorder) recorder->context.micro_batch = recorder->context.chunk = -1;
  // Only now, so that the host does not wait for the device between micro-batches.
  MicroBatchLosses losses;
  for (const StageOutput& output : outputs) losses.push_back(output.loss_sum());
  return losses;
}

}  // namespace ballast
