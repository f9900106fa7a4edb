// Ring attention: executes a RingPlan.  Forward merges partial outputs in fp32; backward accumulates dKV in fp32.
#pragma once
#include <vector>

#include "core/attention_executor.hpp"
#include "core/batch.hpp"
#include "core/recorder.hpp"
#include "core/ring_plan.hpp"
#include "core/sequence_layout.hpp"
#include "parallel/comm.hpp"

namespace ballast {

/// Communicators of a ring and this rank's plan (made once; mesh.cp with cp_outer and cp_inner).
struct RingGroup {
  Communicator cp;  ///< ranks in plan order
  RingPlan plan;
};

/// Attention of one micro-batch over the context-parallel ranks.  Every rank of the group makes one with the same
/// micro-batch and layout.  Indexes of all steps are built here, once per micro-batch, not per layer.
class RingAttention final : public AttentionExecutor {
 public:
  RingAttention(const RingGroup& group, const MicroBatch& batch, const SequenceLayout& layout, Recorder* recorder);
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv) override;

 private:
  const RingGroup& group_;
  Recorder* recorder_;
  std::vector<std::int64_t> shard_tokens_;          ///< local tokens of every context-parallel rank
  std::vector<AttentionIndex> index_;               ///< [shard]: my queries against the keys of that rank
};

}  // namespace ballast
