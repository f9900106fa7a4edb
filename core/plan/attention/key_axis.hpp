// The token axes of one attention call over context-parallel ranks, and how a pattern over the
// whole key axis is cut into one a shard.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/axis_shards.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

/// Tokens of one attention call as one rank has them.
struct AttentionAxes {
  int rank = 0;            ///< of the ring
  std::int64_t align = 1;  ///< segments start at multiples of this (MicroBatch::align)
  std::vector<std::int64_t>
      first_query;     ///< [segments] position of a segment's first query, on whichever rank
  AxisRanges queries;  ///< this rank's, in local order
  AxisShards keys;     ///< what a rank's K and V hold, in local order; by segment, then position
  /// What one call gets at a time, where a ring is walked several times: [turn * shards + shard],
  /// in the end the same keys.  Empty: `keys`.
  AxisShards turns;
  /// Key axes of the calls that patterns are made for.
  const AxisShards& calls() const { return turns.empty() ? keys : turns; }
  std::int64_t q_tokens() const { return token_count(queries); }
  bool operator==(const AttentionAxes&) const = default;
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
  std::int64_t global(std::int32_t segment, std::int64_t position) const {
    return offset[segment] + position - first_position[segment];
  }
  /// Of a range's first token.
  std::int64_t global(const AxisRange& range) const {
    return global(range.segment, range.position);
  }
};
/// Error: a segment whose shards together do not hold every position of its range once.
KeyAxis key_axis(const AttentionAxes& axes);

/// Block of the whole axis that each block of 64 keys of a shard is.  Error: a shard that cuts a
/// block.
std::vector<std::int32_t> global_blocks(const KeyAxis& axis, std::span<const AxisRange> keys);

/// 64 queries of one segment: block `block` of the segment's keys is the one they lie on.
struct QueryBlock {
  int segment = 0;
  std::int64_t block = 0;
  std::int32_t tokens = 0;  ///< of the 64 rows, the others being padding at the end
};
/// Query blocks of a local axis.  Error: a block of 64 that does not lie on one block of the key
/// axis.
std::vector<QueryBlock> query_blocks(std::span<const AxisRange> queries, const KeyAxis& axis);

/// Keys of the whole axis that these queries see.
VisibleKeys visible_keys(std::span<const AxisRange> queries, const KeyAxis& axis);

/// The same cut into one per shard, on that shard's own keys.  Errors: those of global_blocks().
std::vector<VisibleKeys> split_visible(const VisibleKeys& visible, const KeyAxis& axis,
                                       const AxisShards& keys);

/// Cuts a pattern of local queries over the whole key axis into one per shard, on that shard's own
/// keys.  Computed pairs stay the same.  Error: a shard that cuts a block of 64 keys.
std::vector<AttentionPattern> split_keys(const AttentionPattern& pattern, const KeyAxis& axis,
                                         const AxisShards& keys);

}  // namespace ballast
