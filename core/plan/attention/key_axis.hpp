// The token axes of one attention call over context-parallel ranks, and how an index over the whole
// key axis is cut into one index a shard.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

/// Tokens of one attention call as one rank has them.  Padding is a token of segment -1: it sees
/// nothing and nothing sees it.
struct AttentionAxes {
  int rank = 0;            ///< of the ring
  std::int64_t align = 1;  ///< segments start at multiples of this (MicroBatch::align)
  std::vector<std::int64_t>
      first_query;  ///< [segments] position of a segment's first query, on whichever rank
  std::vector<AxisToken> queries;  ///< this rank's, in local order
  std::vector<std::vector<AxisToken>>
      keys;  ///< [shard]: what that rank's K and V hold, in local order; by segment, then position
  /// What one call gets at a time, where a ring is walked several times: [turn * shards + shard],
  /// in the end the same keys.  Empty: `keys`.
  std::vector<std::vector<AxisToken>> turns;
  /// Key axes of the calls that indexes are made for.
  const std::vector<std::vector<AxisToken>>& calls() const { return turns.empty() ? keys : turns; }
};

/// Axes of a micro-batch whose keys are its own tokens.  Error: a layout of other tokens than the
/// micro-batch's.
AttentionAxes attention_axes(const MicroBatch& batch, const SequenceLayout& layout, int rank);

/// All keys of a call in global order: segment after segment, each from a multiple of 64 (of the
/// axes' `align`) on, in ascending position.  A segment's keys are a gapless range of positions, a
/// stored prefix included.
struct KeyAxis {
  std::vector<std::int64_t>
      offset;  ///< [segments + 1] start of each segment on the axis, multiples of 64
  std::vector<std::int64_t>
      first_position;               ///< [segments] position of a segment's first key in its sample
  std::vector<std::int64_t> count;  ///< [segments] keys of the segment, without padding
  int segments() const { return static_cast<int>(count.size()); }
  std::int64_t tokens() const { return offset.back(); }
  std::int64_t global(const AxisToken& token) const {
    return offset[token.segment] + token.position - first_position[token.segment];
  }
};
/// Error: a segment whose shards together do not hold every position of its range once.
KeyAxis key_axis(const AttentionAxes& axes);

/// Block of the whole axis that each block of 64 keys of a shard is.  Error: a shard that cuts a
/// block.
std::vector<std::int32_t> global_blocks(const KeyAxis& axis, const std::vector<AxisToken>& keys);

/// 64 queries of one segment: block `block` of the segment's keys is the one they lie on.
struct QueryBlock {
  int segment = 0;
  std::int64_t block = 0;
};
/// Query blocks of a local axis.  Error: a block of 64 that does not lie on one block of the key
/// axis.
std::vector<QueryBlock> query_blocks(const std::vector<AxisToken>& queries, const KeyAxis& axis);

/// An index of `queries` over the whole key axis that has its visible intervals and nothing else:
/// no runs, no columns.
AttentionPattern visible_pattern(const std::vector<AxisToken>& queries, const KeyAxis& axis,
                                 int index_heads);

/// (query, key) pairs that these queries see: what dense attention computes.
double visible_pairs(const std::vector<AxisToken>& queries, const KeyAxis& axis);

/// Cuts an index of local queries over the whole key axis into one per shard, on that shard's own
/// keys.  Computed pairs stay the same. Error: a shard that cuts a block of 64 keys.
std::vector<AttentionPattern> split_keys(const AttentionPattern& index, const KeyAxis& axis,
                                         const std::vector<std::vector<AxisToken>>& keys);

}  // namespace ballast
