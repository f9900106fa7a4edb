// AttentionPattern: which (query, key) pairs one attention call computes.  An immutable value that
// planners hold; executors hold it as AttentionWork (core/plan/attention/attention_work.hpp).
//
// One format serves dense, packed, chunked, ring-step and sparse attention:
//   * the causal and segment mask is an interval of visible keys per query row, kept by range;
//   * the pattern is, per index head and query block, a sorted list of runs of 64-key blocks;
//   * single key columns come on top, per index head and segment.
// A pair is computed exactly once: when its key is visible AND (a run covers it for that row OR it
// is a column that no run of this query block covers).
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/plan/attention/visible_keys.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

class AxisShards;

/// Half-open run [first, last) of key blocks.  `row_mask` is -1 when all 64 query rows use the run,
/// else an index into PatternArrays::row_masks, whose bit i says that row i of the query block
/// uses it.
struct BlockRun {
  std::int32_t first = 0;
  std::int32_t last = 0;
  std::int32_t row_mask = -1;
};

/// Runs of one query block under one index head, in order.
class BlockRuns {
 public:
  explicit BlockRuns(std::span<const BlockRun> listed) : listed_(listed) {}
  /// One run, or none where it is empty.
  explicit BlockRuns(const BlockRun& one) : one_(one), single_(one.first < one.last) {}
  const BlockRun* begin() const { return single_ ? &one_ : listed_.data(); }
  const BlockRun* end() const { return begin() + size(); }
  std::size_t size() const { return single_ ? 1 : listed_.size(); }

 private:
  std::span<const BlockRun> listed_;
  BlockRun one_;
  bool single_ = false;
};

/// The arrays of a pattern.  Whoever builds one fills them, then makes an AttentionPattern of them.
/// The key axis is whatever the caller hands over: the local micro-batch, a stored prefix followed
/// by a chunk, or the shard held at a ring step.  Keys of one segment are adjacent and ascend in
/// position.
struct PatternArrays {
  VisibleKeys visible;  ///< of every query row
  std::int64_t k_tokens = 0;
  int index_heads = 1;  ///< 1: one pattern for all query heads; otherwise the number of query heads

  /// Every visible pair is computed: one index head, no columns; run_offset, runs and row_masks
  /// stay empty.
  bool dense = false;
  /// Runs of query block b under index head h: runs[run_offset[h * q_blocks + b] .. run_offset[h *
  /// q_blocks + b + 1]), sorted by `first` and disjoint (runs with row masks may touch or overlap
  /// others only if their rows differ).
  std::vector<std::int64_t> run_offset;
  std::vector<BlockRun> runs;
  std::vector<std::uint64_t> row_masks;

  /// Columns of segment s under index head h: columns[column_offset[h * segments + s] ..
  /// column_offset[h * segments + s + 1]), keys in ascending order.  Empty column_offset means no
  /// columns at all.  Columns and row masks exclude each other.
  int segments = 1;
  std::vector<std::int32_t>
      block_segment;  ///< [q_blocks], segment of a query block; needed only with columns.
  std::vector<std::int64_t> column_offset;
  std::vector<std::int32_t> columns;
  /// For index head h, query block b and group g of 64 consecutive columns of its segment: bit j
  /// set means that column 64 g + j is NOT computed there (a run covers it).  Words of (h, b) start
  /// at cover_offset[h * q_blocks + b].  cover_columns() fills them.
  std::vector<std::int64_t> cover_offset;
  std::vector<std::uint64_t> cover;

  std::int64_t q_tokens() const { return visible.rows(); }
  std::int64_t q_blocks() const { return (q_tokens() + kBlock - 1) / kBlock; }
  std::int64_t k_blocks() const { return (k_tokens + kBlock - 1) / kBlock; }
  bool has_columns() const { return !columns.empty(); }
};

/// Fills `cover_offset` and `cover` from runs and columns.  Call after both are set.
void cover_columns(PatternArrays& arrays);
/// Runs of a query block, also where they are not listed because the pattern is dense.
BlockRuns runs_of(const PatternArrays& arrays, int index_head, std::int64_t query_block);

/// What is known of a pattern wherever its arrays lie.
struct PatternCounts {
  std::int64_t q_tokens = 0, k_tokens = 0;
  int index_heads = 1;
  /// (query, key) pairs of each index head; of a device twin only their mean is known.
  std::vector<double> head_pairs;

  /// (query, key) pairs that the call computes, summed over index heads and divided by index_heads:
  /// multiply by the number of query heads and by 4 D for forward FLOPs, 10 D for backward.
  double pairs_per_head() const;
  /// Pairs of one index head; the mean over heads where only that is known.
  double pairs(int head) const;
};

/// Immutable; copies share the arrays.  Pairs are counted when it is made.
class AttentionPattern {
 public:
  /// No queries, no keys.
  AttentionPattern();
  /// The arrays must be well formed (see problems()).
  explicit AttentionPattern(PatternArrays arrays);

  const PatternArrays& arrays() const { return made_->arrays; }
  const PatternCounts& counts() const { return made_->counts; }
  std::int64_t q_tokens() const { return arrays().q_tokens(); }
  std::int64_t k_tokens() const { return arrays().k_tokens; }
  int index_heads() const { return arrays().index_heads; }
  double pairs_per_head() const { return counts().pairs_per_head(); }
  /// Pairs of the dense causal pattern over the same visible keys.
  double visible_pairs() const { return arrays().visible.pairs(); }
  BlockRuns runs(int index_head, std::int64_t query_block) const {
    return runs_of(arrays(), index_head, query_block);
  }

 private:
  struct Made {
    PatternArrays arrays;
    PatternCounts counts;
  };
  std::shared_ptr<const Made> made_;
};

/// Every visible pair.  Error: keys of a segment that are not adjacent or do not ascend; segments
/// in another order than those of the queries.
AttentionPattern dense_pattern(std::span<const AxisRange> queries, std::span<const AxisRange> keys);
/// The same for each shard; neighbours that are alike, as most of a striped layout's are, share
/// one.
std::vector<AttentionPattern> dense_patterns(std::span<const AxisRange> queries,
                                             const AxisShards& keys);

/// Empty when the arrays are well formed, else what is wrong and where.
std::string problems(const PatternArrays& arrays);

}  // namespace ballast
