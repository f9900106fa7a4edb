// What patterns of whole blocks (MoBA, XAttention, heads by blocks) are chosen by, and what builds
// them: Q and K's device decides where.  What the ranks of a ring must join lies between the calls,
// in tensors.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/pattern_blocks.hpp"

namespace ballast {

/// Heads that blocks are chosen for; those of the others are not written.
struct BlockHeads {
  Tensor chosen;  ///< u8 [Hq, pattern blocks], where q lies: 1 at the first block of each segment
                  ///< in which the head goes by blocks; undefined: all
  std::vector<std::int32_t> most;  ///< [Hq] the heaviest so many at most; empty: no limit
};

/// What the call of route() that gave some words was asked for.
struct Routed {
  std::int64_t top_k = 0;  ///< 0: the words are no routing's
  std::int64_t head_dim = 0;
};

class BlockScores {
 public:
  virtual ~BlockScores() = default;

  /// MoBA: i64 [pattern blocks, Hkv D], this rank's keys summed by pattern block (pool_keys()); the
  /// sum over ranks is next.
  virtual Tensor pool(const Tensor& k) const = 0;
  /// Mean keys of the sums of all ranks, as the calls below take them.
  virtual Tensor means(const Tensor& sums) const = 0;
  /// i64 [budgets], in kCoverageUnit: route_coverage() of this rank's q, of the first `told` of
  /// every 64 queries, a multiple of 16; the sum over ranks is next.  Errors as route().
  virtual Tensor coverage(const Tensor& q, const Tensor& means, double scale,
                          const std::vector<std::int64_t>& budgets, int told) const = 0;
  /// i64 [Hq, blocks of 64, widest]: the words of route_queries(), of this rank's q, where q lies.
  virtual Tensor route(const Tensor& q, const Tensor& means, double scale,
                       std::int64_t top_k) const = 0;

  /// XAttention: what score() fills, shard by shard.
  virtual Tensor strides(const Tensor& q, int stride) const = 0;
  /// q against the keys of a shard [T, Hkv, D].
  virtual void score(const Tensor& q, const Tensor& keys, int shard, double scale, int stride,
                     int block, Tensor& strides) const = 0;
  /// By pooled queries, of blocks of 64: as score() leaves it with one stride a block, whose score
  /// is scale times the mean query of this rank's blocks times a mean key.
  virtual Tensor pooled(const Tensor& q, const Tensor& means, double scale) const = 0;
  /// Words as route()'s: per head and block of queries the blocks that hold `share` of the mass,
  /// own and sink block always.  counts i64 [Hq]: blocks chosen by all blocks of queries here.
  virtual Tensor choose(const Tensor& strides, int stride, int block, double share, Tensor& counts,
                        const BlockHeads& heads = {}) const = 0;

  /// The pattern of every call of the axes, for these heads, from words.
  virtual std::vector<AttentionWork> build(const Tensor& words, int q_heads, int kv_heads,
                                           const Routed& routed = {}) const = 0;
};

/// Scores where q lies.  `axes` and `axis` outlive them.
std::unique_ptr<BlockScores> block_scores(const AttentionAxes& axes, const KeyAxis& axis,
                                          std::int64_t block_tokens, const Tensor& q);

}  // namespace ballast
