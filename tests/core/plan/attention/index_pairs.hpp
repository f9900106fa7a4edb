// The pairs of an attention index by its definition, for tests.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// Is the pair computed?  Straight from the header: visible, and covered by a run of that row, or a
/// column that no run of the query block covers.  Does not read the cover words.
inline bool computed(const AttentionPattern& index, int head, std::int64_t i, std::int64_t j) {
  if (j < index.key_begin[i] || j >= index.key_end[i]) return false;
  const std::int64_t block = i / kBlock, list = head * index.q_blocks() + block;
  bool in_run = false, in_any_row = false;
  for (std::int64_t r = index.run_offset[list]; r < index.run_offset[list + 1]; ++r) {
    const BlockRun& run = index.runs[r];
    if (j / kBlock < run.first || j / kBlock >= run.last) continue;
    in_any_row = true;
    in_run |= run.row_mask < 0 || (index.row_masks[run.row_mask] >> (i % kBlock) & 1);
  }
  if (in_run) return true;
  if (in_any_row || index.column_offset.empty()) return false;
  const std::int64_t columns = std::int64_t{head} * index.segments + index.block_segment[block];
  return std::binary_search(index.columns.begin() + index.column_offset[columns],
                            index.columns.begin() + index.column_offset[columns + 1],
                            static_cast<std::int32_t>(j));
}

}  // namespace ballast
