// AttentionPattern: which (query, key) pairs one attention call computes.  A plain value: no MPI,
// CUDA or HDF5.
//
// One format serves dense, packed, chunked, ring-step and sparse attention:
//   * the causal and segment mask is an interval of visible keys per query row;
//   * the pattern is, per index head and query block, a sorted list of runs of 64-key blocks;
//   * single key columns come on top, per index head and segment.
// A pair is computed exactly once: when its key is visible AND (a run covers it for that row OR it
// is a column that no run of this query block covers).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// Half-open run [first, last) of key blocks.  `row_mask` is -1 when all 64 query rows use the run,
/// else an index into AttentionPattern::row_masks, whose bit i says that row i of the query block
/// uses it.
struct BlockRun {
  std::int32_t first = 0;
  std::int32_t last = 0;
  std::int32_t row_mask = -1;
};

/// Index of one attention call.  The key axis is whatever the caller hands over: the local
/// micro-batch, a stored prefix followed by a chunk, or the shard held at a ring step.  Keys of one
/// segment are adjacent and ascend in position.
struct AttentionPattern {
  std::int64_t q_tokens = 0;
  std::int64_t k_tokens = 0;
  int index_heads =
      1;  ///< 1: one pattern for all query heads; otherwise the number of query heads.

  /// Visible keys of query row i are [key_begin[i], key_end[i]); both arrays have q_tokens entries
  /// and are non-decreasing.  Equal values mean that the row sees nothing: its output is 0 and its
  /// LSE is -inf.
  std::vector<std::int32_t> key_begin, key_end;

  /// Runs of query block b under index head h: runs[run_offset[h * q_blocks + b] .. run_offset[h *
  /// q_blocks + b + 1]), sorted by `first` and disjoint (runs with row masks may touch or overlap
  /// others only if their rows differ).
  std::vector<std::int64_t> run_offset;
  std::vector<BlockRun> runs;
  std::vector<std::uint64_t> row_masks;

  /// Columns of segment s under index head h: columns[column_offset[h * segments + s] ..
  /// column_offset[h * segments + s + 1]), key columns in ascending order.  Empty column_offset
  /// means no columns at all. Columns and row masks exclude each other.
  int segments = 1;
  std::vector<std::int32_t>
      block_segment;  ///< [q_blocks], segment of a query block; needed only with columns.
  std::vector<std::int64_t> column_offset;
  std::vector<std::int32_t> columns;
  /// For index head h, query block b and group g of 64 consecutive columns of its segment: bit j
  /// set means that column 64 g + j is NOT computed there (a run covers it).  Words of (h, b) start
  /// at cover_offset[h * q_blocks + b].
  std::vector<std::int64_t> cover_offset;
  std::vector<std::uint64_t> cover;

  /// A backend's own copy of this index (device arrays and what it derives from them), made at the
  /// first call that uses it and shared by copies of this value.  Whoever changes the arrays above
  /// resets it.
  mutable std::shared_ptr<void> mirror;
  mutable double pairs =
      -1;  ///< pairs_per_head() once it was asked for; -1 before.  Reset like `mirror`
  mutable std::vector<double> pairs_of_head;  ///< head_pairs() likewise; empty before

  std::int64_t q_blocks() const { return (q_tokens + kBlock - 1) / kBlock; }
  std::int64_t k_blocks() const { return (k_tokens + kBlock - 1) / kBlock; }
  bool has_columns() const { return !columns.empty(); }

  /// (query, key) pairs that the call computes, summed over index heads and divided by index_heads:
  /// multiply by the number of query heads and by 4 D for forward FLOPs, 10 D for backward.
  double pairs_per_head() const;
  /// (query, key) pairs of one index head; the mean over heads where a backend built the index and
  /// told their sum alone.
  double head_pairs(int head) const;
  /// Pairs of the dense causal index over the same visible intervals.
  double visible_pairs() const;
};

/// Dense index: every visible pair, one run per query block.
AttentionPattern dense_pattern(const std::vector<AxisToken>& queries,
                               const std::vector<AxisToken>& keys);

/// Fills `cover_offset` and `cover` from runs and columns.  Call after both are set.
void cover_columns(AttentionPattern& index);

/// Transpose for backward: per index head and key block, the query blocks that use it, ascending,
/// each with its row mask.  Columns are not part of it (backward handles them by column).
struct TransposedIndex {
  std::vector<std::int64_t> offset;  ///< [index_heads * k_blocks + 1]
  std::vector<std::int32_t> query_block;
  std::vector<std::int32_t> row_mask;  ///< as in BlockRun
};
TransposedIndex transpose(const AttentionPattern& index);

/// Empty when the index is well formed, else what is wrong and where.
std::string problems(const AttentionPattern& index);

}  // namespace ballast
