// Indexes of whole pattern blocks (MoBA) built on the GPU: the device twin of pool_keys(), route_queries() and block_index(), to an index a
// shard whose arrays never leave the device.
#pragma once
#include <memory>
#include <vector>

#include "core/key_axis.hpp"
#include "core/tensor.hpp"
#include "kernels/index_scores.hpp"

namespace ballast::cuda {

class BlockBuilder {
 public:
  /// For one micro-batch: pattern blocks of this rank's queries and of every shard's keys.  block_keys [pattern blocks]: keys of a block on
  /// all ranks; widest: pattern blocks of the longest segment.
  BlockBuilder(const AttentionAxes& axes, const KeyAxis& axis, const PatternRows& queries, const std::vector<PatternRows>& keys,
               const std::vector<std::int32_t>& block_keys, int widest, Device& device);
  ~BlockBuilder();

  /// i64 [pattern blocks, Hkv D]: this rank's keys summed by pattern block; the sum over ranks is next.
  Tensor pool(const Tensor& k) const;
  /// i64 [Hq, blocks of 64, widest]: the words of route_queries(), of this rank's q.  Error: more than 3,072 pattern blocks in a segment.
  Tensor route(const Tensor& q, const Tensor& sums, std::int64_t top_k) const;
  /// One index a shard for calls with these heads.  Waits twice: for the sizes, and for the pairs.
  std::vector<AttentionIndex> build(const Tensor& words, int q_heads, int kv_heads) const;

 private:
  struct Arrays;
  std::shared_ptr<Arrays> arrays_;
};

}  // namespace ballast::cuda
