// MoBA's routing as routed lists (routed_index.hpp) on tensors, where one call holds all keys.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/pattern_blocks.hpp"
#include "kernels/cuda/index/routed_index.hpp"

namespace ballast::cuda {

class RoutedBuilder {
 public:
  RoutedBuilder(const AttentionAxes& axes, const KeyAxis& axis, const PatternBlocks& blocks,
                Device& device);

  /// Whether attention over lists of rows that choose `top_k` blocks is the faster way, and there
  /// are kernels for it.
  bool serves(std::int64_t top_k, int q_heads, std::int64_t head_dim) const;
  /// From words of route_queries() under such a choice.
  AttentionWork build(const std::uint64_t* words, int q_heads, int kv_heads, std::int64_t top_k);

 private:
  RoutedAxis routed_axis(int q_heads, int kv_heads, std::int64_t top_k) const;
  /// (row, key) pairs in the blocks before the rows' own, of one head.
  double routed_pairs(std::int64_t top_k) const;

  Device& device_;
  std::int64_t block_tokens_ = 0;
  int blocks_ = 0, width_ = 0;
  PatternRows rows_;
  bool gapless_ = false;  ///< one call holds the keys of every pattern block one after another
  Tensor block_key_, first_, own_block_, row_count_;
  double visible_pairs_ = 0;
  std::optional<AttentionPattern> own_;  ///< each row's own block
  std::optional<AttentionWork> own_twin_;
};

}  // namespace ballast::cuda
