#include "parallel/pipeline/pipeline_links.hpp"

namespace ballast {

PipelineLinks::PipelineLinks(const Communicator& stages, Device& device) : stages_(stages) {
  const int s = stages.rank(), count = stages.size();
  if (count == 1) return;
  // Pairs (0, 1), (2, 3) ... and then (1, 2), (3, 4) ...: each rank is in at most one pair of
  // either kind.
  for (const int first : {0, 1}) {
    Communicator pair = stages.split((s + 2 - first) / 2, s);
    if (pair.size() == 2) ((s - first) % 2 == 0 ? after_ : before_) = pair;
  }
  for (const int first : {0, 1}) {
    const bool lower = (s - first) % 2 == 0;
    const int peer = lower ? s + 1 : s - 1;
    if (peer < 0 || peer >= count) continue;
    for (const Payload payload : {Payload::activation, Payload::gradient}) {
      const Tensor token = Tensor::zeros({1}, DType::f32, device, MemoryCategory::communication);
      transfer(token, peer, payload, lower == (payload == Payload::activation)).complete();
    }
  }
  device.synchronize();
}

Pending PipelineLinks::transfer(const Tensor& tensor, int peer, Payload payload, bool send) const {
  const int s = stage();
  require(peer >= 0 && peer < stages() && (peer == s - 1 || peer == s + 1),
          "pipeline: stage {} cannot reach stage {} of {}: not a neighbour", s, peer, stages());
  const bool up = peer > s;
  require(up == (send == (payload == Payload::activation)),
          "pipeline: stage {} cannot {} {} stage {}: activations go up, gradients down", s,
          send ? "send" : "receive",
          payload == Payload::activation ? "activations with" : "gradients with", peer);
  const Transfer transfers[] = {{tensor, up ? 1 : 0, send}};
  return (up ? after_ : before_).exchange(transfers, payload == Payload::activation ? 0 : 1);
}

}  // namespace ballast
