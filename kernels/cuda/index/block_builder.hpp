// Indexes of whole pattern blocks (MoBA, XAttention) built on the GPU: the device twin of
// pool_keys(), route_coverage(), route_queries(), stride_scores(), stride_mass() and
// block_pattern(), to an index a shard whose arrays never leave the device.
#pragma once
#include <memory>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/index_scores.hpp"

namespace ballast::cuda {

class BlockBuilder {
 public:
  /// Pattern blocks of one micro-batch.
  struct Blocks {
    PatternRows queries;                   ///< of this rank
    std::vector<PatternRows> shards;       ///< [ranks]: every rank's keys
    std::vector<PatternRows> calls;        ///< every call's keys (axes.calls())
    std::vector<std::int32_t> block_keys;  ///< [pattern blocks] keys of a block on all ranks
    int widest = 0;                        ///< pattern blocks of the longest segment
  };
  BlockBuilder(const AttentionAxes& axes, const KeyAxis& axis, const Blocks& blocks,
               Device& device);
  ~BlockBuilder();

  /// i64 [pattern blocks, Hkv D]: this rank's keys summed by pattern block; the sum over ranks is
  /// next.
  Tensor pool(const Tensor& k) const;
  /// bf16 [2, pattern blocks, Hkv D]: mean keys, high and low parts.
  Tensor means(const Tensor& sums) const;
  /// i64 [budgets], in kCoverageUnit: route_coverage() of this rank's q; the sum over ranks is
  /// next.  Errors as route().
  Tensor coverage(const Tensor& q, const Tensor& means, double scale,
                  const std::vector<std::int64_t>& budgets) const;
  /// i64 [Hq, blocks of 64, widest]: the words of route_queries(), of this rank's q.  Error: more
  /// than 3,072 pattern blocks in a segment.
  Tensor route(const Tensor& q, const Tensor& means, std::int64_t top_k) const;

  /// f32 [Hq, T / stride, widest]: what score_strides() fills, shard by shard.
  Tensor stride_lse(const Tensor& q, int stride) const;
  /// XAttention: q against the keys of a shard [T, Hkv, D].
  void score(const Tensor& q, const Tensor& keys, int shard, double scale, int stride, int block,
             Tensor& lse) const;
  /// Words as route()'s, by choose_strides(); counts i64 [Hq].
  Tensor choose(const Tensor& lse, int stride, int block, double share, Tensor& counts) const;

  /// One index a call of the axes, for these heads.  Waits twice: for the sizes, and for the pairs.
  std::vector<AttentionPattern> build(const Tensor& words, int q_heads, int kv_heads) const;

 private:
  struct Arrays;
  std::shared_ptr<Arrays> arrays_;
};

}  // namespace ballast::cuda
