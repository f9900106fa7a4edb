// Sums over a ring for those who measure indexes beside their sources.
#pragma once
#include "kernels/attention/slash_scores.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Sums over the ring's ranks; they must outlive it.
class CommunicatorJoin final : public RingJoin {
 public:
  explicit CommunicatorJoin(const Communicator& ranks) : ranks_(ranks) {}
  void sum(Tensor& tensor) const override { ranks_.all_reduce(tensor, Reduction::sum); }
  void maximum(Tensor& tensor) const override { ranks_.all_reduce(tensor, Reduction::max); }
  Tensor gather(const Tensor& mine) const override {
    Tensor all = Tensor::empty({ranks_.size() * mine.numel()}, mine.dtype(), host_device(),
                               MemoryCategory::communication);
    ranks_.all_gather(mine, all);
    return all;
  }

 private:
  const Communicator& ranks_;
};

}  // namespace ballast
