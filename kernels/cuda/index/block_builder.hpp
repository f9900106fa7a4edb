// Indexes of whole pattern blocks (MoBA, XAttention) built on the GPU: the device twin of
// pool_keys(), route_coverage(), route_queries(), stride_scores(), stride_mass() and
// block_pattern(), to an index a shard whose arrays never leave the device.
#pragma once
#include <memory>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/block_scores.hpp"

namespace ballast::cuda {

class BlockBuilder final : public BlockScores {
 public:
  BlockBuilder(const AttentionAxes& axes, const KeyAxis& axis, std::int64_t block_tokens,
               Device& device);
  ~BlockBuilder() override;

  Tensor pool(const Tensor& k) const override;
  /// bf16 [2, pattern blocks, Hkv D]: high and low parts.
  Tensor means(const Tensor& sums) const override;
  Tensor coverage(const Tensor& q, const Tensor& means, double scale,
                  const std::vector<std::int64_t>& budgets, int told) const override;
  /// The scale does not matter to the order.  Error: more than kMostRoutedBlocks in a segment.
  Tensor route(const Tensor& q, const Tensor& means, double scale,
               std::int64_t top_k) const override;

  /// f32 [Hq, T / stride, widest]: what score_strides() fills, shard by shard.
  Tensor strides(const Tensor& q, int stride) const override;
  void score(const Tensor& q, const Tensor& keys, int shard, double scale, int stride, int block,
             Tensor& lse) const override;
  /// By choose_strides().
  Tensor choose(const Tensor& lse, int stride, int block, double share, Tensor& counts,
                const BlockHeads& heads = {}) const override;
  /// By score_pooled().
  Tensor pooled(const Tensor& q, const Tensor& means, double scale) const override;

  /// Routed lists where they serve (RoutedBuilder), without waiting; else block lists, which wait
  /// twice: for the sizes, and for the pairs.
  std::vector<AttentionWork> build(const Tensor& words, int q_heads, int kv_heads,
                                   const Routed& routed = {}) const override;

 private:
  struct Arrays;
  std::shared_ptr<Arrays> arrays_;
};

}  // namespace ballast::cuda
