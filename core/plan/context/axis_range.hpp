// Tokens of a packed axis as layouts and attention see them: ranges of one segment, never one
// record a token; and the block that both cut axes into.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ballast {

/// Tokens in a query block and in a key block of every pattern.
inline constexpr int kBlock = 64;

/// Adjacent tokens of an axis whose positions are adjacent in their segment too.
struct AxisRange {
  std::int32_t segment = 0;  ///< -1: padding, which sees nothing and is seen by nothing
  /// Of the first token, inside the sample: a dependent chunk starts above 0.  0 for padding.
  std::int64_t position = 0;
  std::int64_t count = 1;  ///< tokens, at least 1

  bool padding() const { return segment < 0; }
  std::int64_t end() const { return position + count; }
  bool operator==(const AxisRange&) const = default;
};

/// An axis: its ranges in order.
using AxisRanges = std::vector<AxisRange>;

inline std::int64_t token_count(std::span<const AxisRange> axis) {
  std::int64_t tokens = 0;
  for (const AxisRange& range : axis) tokens += range.count;
  return tokens;
}

/// Adds a range behind an axis, as one with the last where it continues it.
inline void append(AxisRanges& axis, const AxisRange& range) {
  if (range.count == 0) return;
  if (!axis.empty() && axis.back().segment == range.segment &&
      (range.padding() || axis.back().end() == range.position))
    axis.back().count += range.count;
  else
    axis.push_back(range);
}

/// Calls visit(first, parts) for every block of 64 tokens of an axis (the last may be shorter):
/// its first token's index on the axis, and its tokens as ranges.
template <class Visit>
void for_each_block(std::span<const AxisRange> axis, Visit&& visit) {
  std::vector<AxisRange> parts;
  std::int64_t first = 0, filled = 0;
  for (AxisRange range : axis)
    while (range.count > 0) {
      AxisRange part = range;
      part.count = std::min<std::int64_t>(range.count, kBlock - filled);
      parts.push_back(part);
      filled += part.count;
      range.count -= part.count;
      if (!range.padding()) range.position += part.count;
      if (filled < kBlock) continue;
      visit(first, std::span<const AxisRange>(parts));
      parts.clear();
      first += kBlock;
      filled = 0;
    }
  if (filled > 0) visit(first, std::span<const AxisRange>(parts));
}

}  // namespace ballast
