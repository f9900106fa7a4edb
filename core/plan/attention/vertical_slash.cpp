#include "core/plan/attention/vertical_slash.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

/// Slashes as ranges [near, far] of neighbouring offsets, farthest first: for a query block they
/// ascend in key block.
std::vector<std::pair<std::int32_t, std::int32_t>> slash_ranges(
    const std::vector<std::int32_t>& slashes) {
  std::vector<std::pair<std::int32_t, std::int32_t>> ranges;
  for (std::int32_t d : slashes) {
    if (!ranges.empty() && ranges.back().second + 1 == d)
      ranges.back().second = d;
    else
      ranges.emplace_back(d, d);
  }
  std::reverse(ranges.begin(), ranges.end());
  return ranges;
}

}  // namespace

VerticalSlash dense_head(std::int64_t tokens) {
  VerticalSlash head;
  head.slashes.resize((tokens + kBlock - 1) / kBlock);
  std::iota(head.slashes.begin(), head.slashes.end(), 0);
  return head;
}

AttentionPattern vertical_slash_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                        const std::vector<std::vector<VerticalSlash>>& heads,
                                        bool sink) {
  const std::vector<QueryBlock> blocks = query_blocks(queries, axis);
  std::size_t count = 1;
  for (const auto& list : heads) count = std::max(count, list.size());
  require(static_cast<int>(heads.size()) == axis.segments(),
          "vertical-slash pattern: patterns of {} segments for {}", heads.size(), axis.segments());
  PatternArrays x;
  x.visible = visible_keys(queries, axis);
  x.k_tokens = axis.tokens();
  x.index_heads = static_cast<int>(count);
  x.segments = std::max(1, axis.segments());
  for (const QueryBlock& block : blocks) x.block_segment.push_back(block.segment);
  x.run_offset.push_back(0);
  x.column_offset.push_back(0);
  for (std::size_t h = 0; h < count; ++h) {
    std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>> ranges(heads.size());
    for (std::size_t s = 0; s < heads.size(); ++s) {
      if (!heads[s].empty()) {
        ranges[s] = slash_ranges(heads[s].at(h).slashes);
        for (std::int64_t c : heads[s][h].columns)
          if (c < axis.count[s]) x.columns.push_back(static_cast<std::int32_t>(axis.offset[s] + c));
      }
      x.column_offset.push_back(static_cast<std::int64_t>(x.columns.size()));
    }
    if (heads.empty()) x.column_offset.push_back(0);
    for (const QueryBlock& block : blocks) {
      const auto first = static_cast<std::int32_t>(axis.offset[block.segment] / kBlock),
                 base = first + static_cast<std::int32_t>(block.block);
      const std::size_t start = x.runs.size();
      const auto add = [&](std::int32_t begin, std::int32_t end) {
        if (x.runs.size() > start && x.runs.back().last >= begin)
          x.runs.back().last = std::max(x.runs.back().last, end);
        else
          x.runs.push_back({begin, end, -1});
      };
      if (sink) add(first, first + 1);
      for (const auto& [near, far] : ranges[block.segment])
        if (near <= block.block)
          add(base - std::min(far, static_cast<std::int32_t>(block.block)), base - near + 1);
      x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    }
  }
  if (x.columns.empty())
    x.column_offset.clear();
  else
    cover_columns(x);
  return AttentionPattern(std::move(x));
}

}  // namespace ballast
