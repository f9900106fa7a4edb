// MoBA's routing as routed lists (routed_index.hpp) on tensors, where one call holds all keys.
#pragma once
#include <map>
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

  /// Whether there are kernels for lists of rows that choose `top_k` blocks.  They are faster than
  /// block lists with row masks whatever the share of pairs: rows that choose all are not listed.
  bool serves(std::int64_t top_k, int q_heads, std::int64_t head_dim) const;
  /// From words of route_queries() under such a choice.
  AttentionWork build(const std::uint64_t* words, int q_heads, int kv_heads, std::int64_t top_k);

 private:
  /// What dense attention computes beside the lists: of rows that list blocks their own block, of
  /// the others every visible key.
  struct Unlisted {
    AttentionPattern pattern;
    AttentionWork twin;
  };
  const Unlisted& unlisted(const RoutedAxis& axis);
  RoutedAxis routed_axis(int q_heads, int kv_heads, std::int64_t top_k) const;
  /// (row, key) pairs of the lists, of one head.
  double routed_pairs(std::int64_t top_k) const;

  Device& device_;
  std::int64_t block_tokens_ = 0;
  int blocks_ = 0, width_ = 0;
  PatternRows rows_;
  bool gapless_ = false;  ///< one call holds the keys of every pattern block one after another
  Tensor block_key_, first_, own_block_, row_count_;
  std::vector<std::int32_t> first_key_;  ///< [pattern blocks]
  VisibleKeys visible_;
  std::int64_t key_tokens_ = 0;
  std::map<int, Unlisted> unlisted_;  ///< by RoutedAxis::slots
};

}  // namespace ballast::cuda
