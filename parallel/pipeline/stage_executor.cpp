#include "parallel/pipeline/stage_executor.hpp"

#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "parallel/comm/host_copy.hpp"

namespace ballast {
namespace {

/// Ops that the host may be ahead of the device: enough to keep it busy, few enough that tensors in
/// flight are given back in time.
constexpr std::size_t kOpsAhead = 2;

bool transfers(OpKind kind) { return kind == OpKind::send || kind == OpKind::recv; }

/// One walk over a stage's list.
class StageRun {
 public:
  StageRun(const std::vector<Op>& ops, int micro_batches, StageModel& model,
           const PipelineLinks& links, const StageCallbacks& callbacks, Recorder* recorder)
      : ops_(ops), model_(model), links_(links), callbacks_(callbacks), recorder_(recorder) {
    if (callbacks.gradients_final) ends_ = ends_gradients(ops);
    live_.resize(static_cast<std::size_t>(micro_batches));
    outputs_.resize(live_.size());
    ahead_.resize(live_.size());
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].kind == OpKind::collective) continue;
      Ahead& a = ahead_.at(static_cast<std::size_t>(ops[i].micro_batch));
      a.last_op = i;
      a.backward |= ops[i].kind == OpKind::backward || ops[i].kind == OpKind::backward_input;
      a.recompute |= ops[i].kind == OpKind::recompute;
    }
  }

  MicroBatchLosses walk() {
    for (at_ = 0; at_ < ops_.size(); ++at_) {
      const Op& op = ops_[at_];
      if (op.kind == OpKind::collective) {
        if (recorder_) recorder_->context.micro_batch = recorder_->context.chunk = -1;
        callbacks_.collective(op.micro_batch);
        continue;
      }
      set_context(op);
      // A receive that is posted on a GPU waits there, and an allocation by the host would wait for
      // it.
      if (!transfers(op.kind) && model_.device().space() == Space::host) post_receives(at_ + 1);
      const std::size_t leaving = leaving_.size();
      run(op);
      if (computes(op.kind)) let_go(leaving);
      if (ahead_[static_cast<std::size_t>(op.micro_batch)].last_op == at_)
        live_[static_cast<std::size_t>(op.micro_batch)].reset();
      std::erase_if(sends_, [](Pending& send) { return send.test(); });
      if (links_.stages() > 1 && !transfers(op.kind)) pace();
    }
    for (Pending& send : sends_) send.complete();
    let_go(leaving_.size());
    if (recorder_) recorder_->context.micro_batch = recorder_->context.chunk = -1;
    // Only now, so that the host does not wait for the device between micro-batches.
    MicroBatchLosses losses;
    for (const StageOutput& output : outputs_) losses.push_back(output.loss_sum());
    return losses;
  }

 private:
  /// A micro-batch between its first op and its last.
  struct Live {
    MicroBatchWork work;
    Tensor input;             ///< from the stage before, until the last forward or recompute
    RingBuffers::Lease away;  ///< the input in host memory; busy: with its last copy, there or back
    Tensor output;            ///< for the next stage, until it is sent
    Tensor d_output;          ///< from the next stage, until backward
    Tensor d_input;           ///< for the stage before, until it is sent
    StageActivationsPtr saved;  ///< until backward, or its weight half
  };
  struct Ahead {
    std::size_t last_op = 0;
    bool backward = false, recompute = false;
  };
  struct Receive {
    Tensor tensor;
    Pending pending;
  };
  /// A tensor on its way to host memory.
  struct Leaving {
    Tensor tensor;
    Fence copied;
  };

  void set_context(const Op& op) {
    if (!recorder_) return;
    recorder_->context.micro_batch = op.micro_batch;
    recorder_->context.chunk = op.chunk;
  }

  Live& live(const Op& op) {
    auto& slot = live_.at(static_cast<std::size_t>(op.micro_batch));
    if (!slot) {
      // A receive that is posted ahead prepares its micro-batch while another one is at work.
      set_context(op);
      {
        Scope data(recorder_, EventKind::data);
        slot.emplace();
        slot->work = callbacks_.prepare(op.micro_batch);
      }
      set_context(ops_[at_]);
    }
    return *slot;
  }

  /// Posts the receives from op `first` on, up to the next computation.
  void post_receives(std::size_t first) {
    for (std::size_t i = first; i < ops_.size() && transfers(ops_[i].kind); ++i) {
      if (ops_[i].kind != OpKind::recv || receives_.count(i) != 0) continue;
      const Op& op = ops_[i];
      Receive receive;
      receive.tensor = Tensor::empty(
          {live(op).work.batch.size(), model_.shape().hidden}, model_.type(), model_.device(),
          op.payload == Payload::activation ? MemoryCategory::activations
                                            : MemoryCategory::communication);
      receive.pending = links_.receive(receive.tensor, op.peer, op.payload);
      receives_.emplace(i, std::move(receive));
    }
  }

  void run(const Op& op) {
    switch (op.kind) {
      case OpKind::recv:
        return receive(op);
      case OpKind::send:
        return send(op);
      case OpKind::forward:
      case OpKind::recompute:
        return forward(op);
      case OpKind::backward:
      case OpKind::backward_input:
        return backward(op);
      case OpKind::backward_weight:
        return backward_weight(op);
      case OpKind::offload:
        return offload(op);
      case OpKind::fetch:
        return fetch(op);
      case OpKind::collective:
        return;  // walk() runs it
    }
  }

  void receive(const Op& op) {
    post_receives(at_);
    Live& l = live(op);
    Scope scope(recorder_, event_kind(op.kind));
    Receive receive = std::move(receives_.extract(at_).mapped());
    receive.pending.complete();
    scope.bytes = static_cast<std::int64_t>(receive.tensor.bytes());
    (op.payload == Payload::activation ? l.input : l.d_output) = receive.tensor;
  }

  void send(const Op& op) {
    Live& l = live(op);
    Scope scope(recorder_, event_kind(op.kind));
    Tensor& tensor = op.payload == Payload::activation ? l.output : l.d_input;
    require(tensor.defined(), "schedule: micro-batch {} is sent to stage {} before it is computed",
            op.micro_batch, op.peer);
    scope.bytes = static_cast<std::int64_t>(tensor.bytes());
    sends_.push_back(links_.send(tensor, op.peer, op.payload));
    tensor = {};
  }

  /// For the backward that is running.
  GradientsFinal gradients_final() const {
    return !ends_.empty() && ends_[at_] != 0 ? callbacks_.gradients_final : GradientsFinal{};
  }

  /// A whole backward, or its half that the stage before waits for.
  void backward(const Op& op) {
    Live& l = live(op);
    require(l.saved != nullptr && l.work.attention != nullptr,
            "schedule: {} of micro-batch {} before its forward", name(op.kind), op.micro_batch);
    Scope scope(recorder_, event_kind(op.kind));
    if (op.kind == OpKind::backward)
      l.d_input = model_.backward(l.work.batch, std::move(l.saved), *l.work.attention, l.d_output,
                                  gradients_final());
    else
      l.d_input = model_.backward_input(l.work.batch, *l.saved, *l.work.attention, l.d_output);
    l.work.attention.reset();  // the weight half needs neither stored keys nor an index
    l.d_output = {};
  }

  void backward_weight(const Op& op) {
    Live& l = live(op);
    require(l.saved != nullptr && l.work.attention == nullptr,
            "schedule: backward_weight of micro-batch {} before its backward_input",
            op.micro_batch);
    Scope scope(recorder_, event_kind(op.kind));
    model_.backward_weight(std::move(l.saved), gradients_final());
  }

  void require_host_copy(const Op& op, const Tensor& moved) const {
    require(callbacks_.host != nullptr && moved.defined(),
            "schedule: {} of micro-batch {}: there is nothing to move, or no host memory to "
            "move it to",
            name(op.kind), op.micro_batch);
  }

  void offload(const Op& op) {
    Live& l = live(op);
    require_host_copy(op, l.input);
    l.away = callbacks_.host->take(l.input.shape(), l.input.dtype(), pinned_device());
    l.away.busy =
        copy_beside(model_.device(), Queue::to_host, {{l.away.tensor, l.input}}, recorder_);
    leaving_.push_back({std::exchange(l.input, {}), l.away.busy});
  }

  void fetch(const Op& op) {
    Live& l = live(op);
    require_host_copy(op, l.away.tensor);
    Device& device = model_.device();
    l.input = Tensor::empty(l.away.tensor.shape(), l.away.tensor.dtype(), device);
    device.wait(l.away.busy, Queue::to_device);
    l.away.busy = copy_beside(device, Queue::to_device, {{l.input, l.away.tensor}}, recorder_);
  }

  void forward(const Op& op) {
    Live& l = live(op);
    const bool again = op.kind == OpKind::recompute;
    const Ahead& a = ahead_[static_cast<std::size_t>(op.micro_batch)];
    require(model_.first() || l.input.defined(),
            "schedule: {} of micro-batch {} before its input is there", name(op.kind),
            op.micro_batch);
    if (again && l.away.tensor.defined()) {
      wait_for_copy(model_.device(), std::exchange(l.away.busy, {}), recorder_);
      l.away = {};
    }
    Scope scope(recorder_, event_kind(op.kind));
    const bool keep = again || (a.backward && !a.recompute);
    const bool counts =
        again || !a.recompute;  // a chunk that is forwarded twice takes its loss the second time
    StageOutput output =
        model_.forward(l.work.batch, l.input, *l.work.attention, keep ? &l.saved : nullptr, counts);
    if (keep || !a.backward) l.input = {};  // what backward needs of it is among the activations
    if (model_.last() && callbacks_.output)
      return callbacks_.output(op.micro_batch, l.work.batch, output);
    if (!again) l.output = std::move(output.hidden);
    if (!counts) return;
    StageOutput& kept = outputs_[static_cast<std::size_t>(op.micro_batch)];
    kept.token_loss = std::move(output.token_loss);
    kept.loss_weights = std::move(output.loss_weights);
  }

  /// Gives the first `count` tensors that left back to the pool, once they have left: their copies
  /// had the op just queued to hide behind.
  void let_go(std::size_t count) {
    for (; count > 0; --count) {
      wait_for_copy(model_.device(), leaving_.front().copied, recorder_);
      leaving_.pop_front();
    }
  }

  void pace() {
    fences_.push_back(model_.device().fence(Queue::compute));
    if (fences_.size() <= kOpsAhead) return;
    model_.device().wait(fences_.front());
    fences_.pop_front();
  }

  const std::vector<Op>& ops_;
  StageModel& model_;
  const PipelineLinks& links_;
  const StageCallbacks& callbacks_;
  Recorder* recorder_;
  std::size_t at_ = 0;
  std::vector<char> ends_;  ///< [op]; empty: nobody asks
  std::vector<Ahead> ahead_;
  std::vector<StageOutput> outputs_;
  std::vector<std::optional<Live>> live_;
  std::deque<Fence> fences_;
  std::deque<Leaving> leaving_;
  std::vector<Pending> sends_;
  std::map<std::size_t, Receive> receives_;  ///< posted, by op
};

}  // namespace

EventKind event_kind(OpKind kind) {
  switch (kind) {
    case OpKind::forward:
      return EventKind::forward;
    case OpKind::recompute:
      return EventKind::recompute;
    case OpKind::backward:
      return EventKind::backward;
    case OpKind::backward_input:
      return EventKind::backward_input;
    case OpKind::backward_weight:
      return EventKind::backward_weight;
    case OpKind::send:
      return EventKind::send;
    case OpKind::recv:
      return EventKind::recv;
    case OpKind::offload:
      return EventKind::offload;
    case OpKind::fetch:
      return EventKind::fetch;
    case OpKind::collective:
      return EventKind::gradient_reduce;
  }
  return EventKind::idle;
}

MicroBatchLosses run_stage(const Schedule& schedule, int micro_batches, StageModel& model,
                           const PipelineLinks& links, const StageCallbacks& callbacks,
                           Recorder* recorder) {
  require(static_cast<int>(schedule.stages.size()) == links.stages(),
          "schedule of {} stages on a pipeline of {}", schedule.stages.size(), links.stages());
  return StageRun(schedule.stages[static_cast<std::size_t>(links.stage())], micro_batches, model,
                  links, callbacks, recorder)
      .walk();
}

int first_nonfinite_layer(MicroBatchWork& work, StageModel& model, const PipelineLinks& links) {
  const int s = links.stage();
  Tensor input;
  if (s > 0) {
    input = Tensor::empty({work.batch.size(), model.shape().hidden}, model.type(), model.device());
    links.receive(input, s - 1, Payload::activation).complete();
  }
  const auto [layer, output] = model.first_nonfinite_layer(work.batch, input, *work.attention);
  if (s + 1 < links.stages()) links.send(output.hidden, s + 1, Payload::activation).complete();
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  const std::int64_t first =
      links.communicator().all_reduce(layer < 0 ? kNone : std::int64_t{layer}, Reduction::min);
  return first == kNone ? -1 : static_cast<int>(first);
}

}  // namespace ballast
