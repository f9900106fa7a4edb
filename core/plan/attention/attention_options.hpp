// What the deck says of the attention pattern, as one value for planner and executors.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/attention/pattern_kind.hpp"
#include "core/plan/attention/recorded_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

class HeadTable;  // core/plan/attention/head_rules.hpp

struct AttentionOptions {
  PatternKind pattern = PatternKind::dense;
  IndexOrigin index = IndexOrigin::pattern;
  GeneratedPattern generator;  ///< of generated indexes (its tokens are the planner's); heads of
                               ///< recorded ones
  std::shared_ptr<const RecordedIndexes> recorded;  ///< who runs them reads them

  double vertical_share =
      0.9;  ///< vertical_slash: p_v, share of the observed mass that the columns hold
  double slash_share = 0.9;  ///< vertical_slash: p_s, likewise of the slashes
  std::int64_t last_q = 64;  ///< vertical_slash, by_head, flexprefill: queries at the end of a
                             ///< segment (causal: before each stretch) that are observed
  IndexSelection selection = IndexSelection::last;  ///< vertical_slash
  std::int64_t stretch = 1024;  ///< causal: queries that share a choice, counted from a sample's
                                ///< start; the first are dense, later ones dense among themselves
  CoverageRows coverage_rows = CoverageRows::last;  ///< under a BudgetPolicy
  std::int64_t max_columns = 0;         ///< vertical_slash: columns of a head at most; 0: no cap
  std::int64_t max_slashes = 0;         ///< vertical_slash: slashes of a head at most; 0: no cap
  std::int64_t moba_block = 256;        ///< tokens
  std::int64_t moba_top_k = 32;         ///< blocks a query, its own included
  std::int64_t xattention_block = 128;  ///< tokens
  std::int64_t xattention_stride = 16;  ///< tokens between antidiagonals
  double xattention_threshold = 0.9;    ///< share of the estimated mass that a row of blocks keeps
  std::shared_ptr<const HeadTable> heads;  ///< by_head; who runs it reads it
  double flex_threshold = 0.1;  ///< flexprefill: divergence() below which a head takes blocks
  double flex_share = 0.95;     ///< flexprefill: share of the mass that blocks, columns and slashes
                                ///< each hold
  std::int64_t indexes_every = 0;  ///< steps between recordings of the choice; 0: none
  std::int64_t recall_every = 0;   ///< steps between measurements of recall; 0: none
  std::int64_t recall_rows = 32;   ///< queries sampled of a layer and segment
  std::uint64_t recall_seed = 0;
  /// [segments] of the micro-batch: what names their draws, such as the sample.  Empty: its places.
  std::vector<std::uint64_t> recall_names;

  /// Indexes are cut in blocks of 64, so segments, shards and stripes start at multiples of 64.
  bool sparse() const { return !chosen() || pattern != PatternKind::dense; }
  /// By the pattern's own rule.
  bool chosen() const { return index == IndexOrigin::pattern; }
  bool causal() const {
    return chosen() && pattern == PatternKind::vertical_slash &&
           selection == IndexSelection::causal;
  }
  /// Segments of no more tokens are computed whole.
  std::int64_t whole_tokens() const { return causal() ? stretch : last_q; }
  std::int64_t align() const {
    if (!sparse()) return 1;
    // Both halves of a block of xattention are scored by one rank.
    return chosen() && pattern == PatternKind::xattention
               ? std::max<std::int64_t>(kBlock, xattention_block)
               : kBlock;
  }
};

}  // namespace ballast
