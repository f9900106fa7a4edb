// Ring attention: executes a RingPlan.  Forward merges partial outputs in fp32; backward accumulates dKV in fp32 (fp64 for
// fp64 inputs).  Only the key/value heads travel, K and V of a shard in one buffer of exactly its tokens.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/attention_executor.hpp"
#include "core/index_source.hpp"
#include "core/recorder.hpp"
#include "core/ring_plan.hpp"
#include "parallel/comm.hpp"

namespace ballast {

/// Buffers that rings lend out and take back: the steady state allocates nothing, over layers and micro-batches.
class RingBuffers {
 public:
  /// A buffer on loan; returns to the pool with its last move.
  class Lease {
   public:
    Lease() = default;
    Lease(RingBuffers* pool, Tensor storage, const Shape& shape);
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    Tensor tensor;  ///< contiguous, contents undefined at first

   private:
    RingBuffers* pool_ = nullptr;
    Tensor storage_;
  };
  /// `capacity`: elements to allocate for when no free buffer fits `shape` (so that shards of all sizes share buffers).
  Lease take(const Shape& shape, DType type, Device& device, std::int64_t capacity = 0);

 private:
  std::vector<Tensor> free_;
};

/// Channel of a level's hops (Communicator::exchange): those between nodes must not hold up those inside a node.
inline int ring_channel(RingLevel level) { return level == RingLevel::outer ? 1 : 0; }

/// Communicator of a ring, this rank's plan and the buffers (made once; plan of mesh.cp with cp_outer and cp_inner).
struct RingGroup {
  Communicator cp;  ///< ranks in plan order
  RingPlan plan;
  std::shared_ptr<RingBuffers> buffers = std::make_shared<RingBuffers>();
};

/// Attention of one micro-batch over the context-parallel ranks.  Every rank of the group makes one, with a source of the same micro-batch
/// and layout.  The source says which keys each shard holds and which pairs are computed; the ring only carries them.
/// Records one attention event a ring step with the useful FLOPs, and one ring_wait with the bytes this rank sent.
class RingAttention final : public AttentionExecutor {
 public:
  /// `group` must outlive it.  Throws Error when plan, communicator and the source's axes disagree on sizes.
  RingAttention(const RingGroup& group, std::unique_ptr<IndexSource> source, Recorder* recorder);
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o, Tensor& dq, Tensor& dk,
                Tensor& dv) override;

 private:
  void check(const AttentionInputs& in) const;
  const RingGroup& group_;
  Recorder* recorder_;
  std::unique_ptr<IndexSource> source_;
  std::vector<std::int64_t> shard_tokens_;  ///< keys of every shard
};

}  // namespace ballast
