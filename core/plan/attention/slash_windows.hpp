// Which queries of a micro-batch choose its vertical-slash patterns, and how many of them are
// observed at a time: what executors do, and what the memory model counts.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// Queries of a segment that share one choice, and the rows that it is made by.  All are positions.
struct SlashWindow {
  int segment = 0;
  std::int64_t begin = 0, end = 0;  ///< queries; none: the choice is for those behind the chunk
  AxisRanges rows = {};             ///< ascending; none, and not whole: the choice is handed in
  bool whole = false;               ///< computed whole, not observed
  std::int64_t queries() const { return end - begin; }
  bool observed() const { return !whole && !rows.empty(); }
};

/// Windows of all segments, ascending by segment and begin, observed by their last queries: one a
/// segment, or, where the selection is causal, one a stretch.  first_query [segments] as
/// AttentionAxes::first_query; `carries`: the choice at the end of a dependent chunk is kept for
/// the next one.  Error: under a causal selection, a chunk that does not start at a stretch.
std::vector<SlashWindow> slash_windows(const AttentionOptions& options, const KeyAxis& axis,
                                       std::span<const std::int64_t> first_query, bool carries);

/// Keys that the observed rows of a window see.
std::int64_t observed_pairs(const SlashWindow& window, const KeyAxis& axis);

/// [batches + 1] places in `windows` (not empty) between which rows are observed together: as many
/// as see no more keys than the last queries of all segments can, so that a causal selection holds
/// no more scores at a time than one by last queries, which is a single batch.
std::vector<std::size_t> observed_batches(std::span<const SlashWindow> windows, const KeyAxis& axis,
                                          std::int64_t last_q);

}  // namespace ballast
