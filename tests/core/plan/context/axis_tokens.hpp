// Axes one record a token, for tests that look at every pair.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

struct AxisToken {
  std::int32_t segment = 0;  ///< -1: padding
  std::int64_t position = 0;
};

inline std::vector<AxisToken> tokens_of(std::span<const AxisRange> axis) {
  std::vector<AxisToken> tokens;
  for (const AxisRange& range : axis)
    for (std::int64_t i = 0; i < range.count; ++i)
      tokens.push_back({range.segment, range.padding() ? 0 : range.position + i});
  return tokens;
}

inline AxisRanges ranges_of(const std::vector<AxisToken>& tokens) {
  AxisRanges ranges;
  for (const AxisToken& token : tokens) append(ranges, {token.segment, token.position, 1});
  return ranges;
}

inline std::vector<AxisToken> local_tokens(const MicroBatch& batch, const SequenceLayout& layout,
                                           int rank) {
  return tokens_of(local_ranges(batch, layout, rank));
}

inline AttentionPattern dense_pattern(const std::vector<AxisToken>& queries,
                                      const std::vector<AxisToken>& keys) {
  return dense_pattern(ranges_of(queries), ranges_of(keys));
}

}  // namespace ballast
