// Vertical-slash patterns.  Source: MTraining Section 4.1, Algorithm 1
// (sparseformat).
#pragma once
#include <cstdint>
#include <span>
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

/// The head that computes every causal pair.
VerticalSlash dense_head(std::int64_t tokens);

/// Pattern of `queries` over the whole key axis: heads[s][h] is head h over segment s (an empty
/// list: a segment without keys).  `sink`: every query uses its segment's first block too.
AttentionPattern vertical_slash_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                        const std::vector<std::vector<VerticalSlash>>& heads,
                                        bool sink);

}  // namespace ballast
