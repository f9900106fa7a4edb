// Pattern blocks: the blocks of keys that MoBA and XAttention choose from.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/attention/key_axis.hpp"
#include "kernels/attention/index_scores.hpp"

namespace ballast {

/// Pattern blocks of `block_tokens` on the key axis, counted from each segment's start and numbered
/// over all segments.
struct PatternBlocks {
  PatternBlocks(const KeyAxis& axis, std::int64_t block_tokens);
  /// Local blocks of 64 among them.
  PatternRows rows(const KeyAxis& axis, std::span<const AxisRange> tokens) const;
  /// [count()] keys of each on all ranks.
  std::vector<std::int32_t> keys(const KeyAxis& axis) const;
  std::int64_t block_tokens = 0;
  std::vector<std::int64_t> first;  ///< [segments + 1]
  std::int64_t count() const { return first.back(); }
  std::int64_t widest() const;  ///< blocks of the longest segment
};

}  // namespace ballast
