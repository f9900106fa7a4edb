// Ring attention: executes a RingPlan.  Forward merges partial outputs in fp32; backward
// accumulates dKV in fp32 (fp64 for fp64 inputs).  Only the key/value heads travel, K and V of a
// shard in one buffer of exactly its tokens.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/index_source.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "parallel/comm/comm.hpp"
#include "parallel/context/kv_store.hpp"
#include "parallel/context/ring_buffers.hpp"

namespace ballast {

/// What a hop hands to Communicator::exchange: one receive, one send, and the channel of its level.
/// Each level has its own: hops between nodes must not hold up those inside a node.
struct HopTransfers {
  std::array<Transfer, 2> list;
  int channel = 0;
};
inline HopTransfers hop_transfers(const RingHop& hop, const Tensor& received, const Tensor& sent) {
  return {{Transfer{received, hop.from, false}, Transfer{sent, hop.to, true}},
          hop.level == RingLevel::outer ? 1 : 0};
}

/// Communicator of a ring, this rank's plan and the buffers.
struct RingGroup {
  Communicator cp;  ///< ranks in plan order
  RingPlan plan;
  std::shared_ptr<RingBuffers> buffers = std::make_shared<RingBuffers>();
};

/// Attention of one micro-batch over the context-parallel ranks.  Every rank of the group makes
/// one, with a source of the same micro-batch and layout.  The source says which keys each shard
/// holds and which pairs are computed; the ring only carries them.  A dependent chunk's keys are
/// those of its store, walked in the store's turns; its backward adds to the store's accumulators.
/// What a turn needs of the store begins to come before the turn before it is computed. Records one
/// attention event a ring step with the useful FLOPs, and one ring_wait with the bytes this rank
/// sent.
class RingAttention final : public AttentionExecutor {
 public:
  /// `group` must outlive it.  Throws Error when plan, communicator and the source's axes disagree
  /// on sizes.
  RingAttention(const RingGroup& group, std::unique_ptr<IndexSource> source, Recorder* recorder,
                StoredChunk stored = {});
  void forward(const AttentionInputs& in, Tensor& o, Tensor& lse) override;
  void backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                Tensor& dq, Tensor& dk, Tensor& dv) override;

 private:
  void check(const AttentionInputs& in) const;
  int turns() const { return static_cast<int>(tokens_.size()); }
  const std::vector<AttentionWork>& indexes(const AttentionInputs& in);
  const AttentionWork& index(const std::vector<AttentionWork>& all, int turn, int shard) const {
    return all[static_cast<std::size_t>(turn * group_.plan.ranks() + shard)];
  }
  /// Of a turn; nothing after the last one.
  KvStore::Keys keys(const AttentionInputs& in, int turn);
  KvStore::Sums sums(const AttentionInputs& in, int turn);
  const RingGroup& group_;
  Recorder* recorder_;
  std::unique_ptr<IndexSource> source_;
  StoredChunk stored_;
  std::vector<std::vector<std::int64_t>> tokens_;  ///< [turn][shard] keys
};

}  // namespace ballast
