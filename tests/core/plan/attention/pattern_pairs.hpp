// The pairs of an attention pattern by its definition, for tests.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// Is the pair computed?  Straight from the header: visible, and covered by a run of that row, or a
/// column that no run of the query block covers.  Does not read the cover words.
inline bool computed(const PatternArrays& x, int head, std::int64_t i, std::int64_t j) {
  const KeyInterval seen = x.visible.row(i);
  if (j < seen.begin || j >= seen.end) return false;
  const std::int64_t block = i / kBlock;
  bool in_run = false, in_any_row = false;
  for (const BlockRun& run : runs_of(x, head, block)) {
    if (j / kBlock < run.first || j / kBlock >= run.last) continue;
    in_any_row = true;
    in_run |= run.row_mask < 0 || (x.row_masks[run.row_mask] >> (i % kBlock) & 1);
  }
  if (in_run) return true;
  if (in_any_row || x.column_offset.empty()) return false;
  const std::int64_t columns = std::int64_t{head} * x.segments + x.block_segment[block];
  return std::binary_search(x.columns.begin() + x.column_offset[columns],
                            x.columns.begin() + x.column_offset[columns + 1],
                            static_cast<std::int32_t>(j));
}
inline bool computed(const AttentionPattern& pattern, int head, std::int64_t i, std::int64_t j) {
  return computed(pattern.arrays(), head, i, j);
}
inline std::string problems(const AttentionPattern& pattern) { return problems(pattern.arrays()); }

/// The arrays of a dense pattern with its runs listed, to change.
inline PatternArrays listed(const AttentionPattern& dense) {
  PatternArrays x = dense.arrays();
  x.dense = false;
  x.run_offset.assign(1, 0);
  for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
    for (const BlockRun& run : dense.runs(0, b)) x.runs.push_back(run);
    x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
  }
  return x;
}

}  // namespace ballast
