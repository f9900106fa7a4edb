// Vertical-slash patterns.  Source: MTraining Section 4.1, Algorithm 1
// (sparseformat).
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// One head over one segment.  A slash d is the block diagonal (i, i - d), computed whole under the
/// causal mask; a column is a key that all later queries use.  Blocks and keys count from the
/// segment's start.
struct VerticalSlash {
  std::vector<std::int32_t> slashes;  ///< ascending
  std::vector<std::int64_t> columns;  ///< ascending
};

/// What was chosen for a head, and what that left out.
struct HeadChoice {
  VerticalSlash head;
  std::int64_t overflow = 0;  ///< columns and slashes that the caps left out
  /// Share of the observed mass that lies on the columns, or on the slashes, that the caps left
  /// out: the larger of the two, since a pair may lie on both.
  double overflow_mass = 0;
};

/// The head that computes every causal pair.
VerticalSlash dense_head(std::int64_t tokens);

/// Queries of a segment that share one choice: those from block `first` of its keys on, up to the
/// segment's next stretch.
struct SlashStretch {
  int segment = 0;
  std::int64_t first = 0;
  bool local = false;  ///< their blocks from `first` on are computed whole too
  std::vector<VerticalSlash> heads;
};

/// Blocks of 64 keys chosen for each block of 64 queries, of heads that go by them in place of
/// slashes and columns.
struct ChosenBlocks {
  /// [heads][query blocks][width]: not 0 where the block, counted from the segment's first, is
  /// computed.
  const std::int64_t* words = nullptr;
  std::int64_t width = 0;
  std::vector<char> heads;  ///< [stretches][heads] whether the head goes by them there
};

/// The choice of each head, made at the end of a dependent chunk, for the queries behind it, by
/// layer and position: kept with the sample's keys and values.
using SlashCarry = std::map<std::pair<int, std::int64_t>, std::vector<HeadChoice>>;

/// Pattern of `queries` over the whole key axis.  Stretches ascend by segment and `first` and hold
/// every query; all have the same number of heads.  `sink`: every query uses its segment's first
/// block too.  `blocks`: may be null.
AttentionPattern vertical_slash_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                        std::span<const SlashStretch> stretches, bool sink,
                                        const ChosenBlocks* blocks = nullptr);
/// The same with one choice a segment: heads[s][h] is head h over segment s (an empty list: a
/// segment without keys).
AttentionPattern vertical_slash_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                        const std::vector<std::vector<VerticalSlash>>& heads,
                                        bool sink);

}  // namespace ballast
