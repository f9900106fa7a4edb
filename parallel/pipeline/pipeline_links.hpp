// Links between neighbouring pipeline stages: activations go to the next stage, gradients to the
// one before.
#pragma once
#include "core/base/device.hpp"
#include "core/plan/pipeline/schedule.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Each pair of neighbours has a communicator of its own, with a channel for activations and one
/// for gradients, so that a message waits only for earlier ones of the same pair and payload:
/// whatever order a schedule sends in, the receiver takes it in that order, and a send whose
/// receiver is busy holds up nothing else.  So a schedule that is free of deadlock with unlimited
/// buffers (core/plan/pipeline/schedule's simulate) is free of it here; NCCL lets the host post
/// eight transfers a channel ahead, which no schedule of core/plan/pipeline/pipeline_schedule needs
/// to exceed.
class PipelineLinks {
 public:
  PipelineLinks() = default;  ///< one stage
  /// `stages`: the ranks of a pipeline, in stage order.  Collective; opens all channels for tensors
  /// of `device`, because NCCL meets its peer at a channel's first use.
  PipelineLinks(const Communicator& stages, Device& device);
  int stage() const { return stages_.rank(); }
  int stages() const { return stages_.size(); }
  const Communicator& communicator() const { return stages_; }
  /// `tensor` is contiguous and stays untouched until the transfer completes; `peer` is a
  /// neighbouring stage.
  Pending send(const Tensor& tensor, int peer, Payload payload) const {
    return transfer(tensor, peer, payload, true);
  }
  Pending receive(const Tensor& tensor, int peer, Payload payload) const {
    return transfer(tensor, peer, payload, false);
  }

 private:
  Pending transfer(const Tensor& tensor, int peer, Payload payload, bool send) const;
  Communicator stages_, before_, after_;  ///< the pair with the stage before, with the stage after
};

}  // namespace ballast
