// What a sparse pattern computes, given observed mass: pure functions, the same on any number of
// ranks. Mass is 64-bit fixed point, so that sums do not depend on their order.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/vertical_slash.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// One unit of probability mass; room for 2^22 of them in a sum.
inline constexpr double kMassUnit = 1099511627776.0;  // 2^40

/// An element that may be chosen, and its mass.
struct MassItem {
  std::int64_t index = 0;
  std::int64_t mass = 0;
};

struct Selection {
  std::vector<std::int64_t> chosen;  ///< ascending
  std::int64_t overflow = 0;         ///< elements that the share asked for and the cap leaves out
  std::int64_t overflow_mass = 0;    ///< theirs
};

/// The fewest elements whose mass reaches `share` of `total`: heaviest first, ties to the lower
/// index, the one that crosses included; at most `cap` of them (0: no cap).  A share of 1 takes
/// all, those without mass too.  Elements below `given` are computed whatever is chosen: they count
/// for share and cap, but a cap that drops one leaves nothing out.
Selection top_share(std::vector<MassItem> items, std::int64_t total, double share, std::int64_t cap,
                    std::int64_t given = 0);
/// The `count` heaviest, likewise.
std::vector<MassItem> heaviest(std::vector<MassItem> items, std::int64_t count);

/// Observed mass of one head over one segment.
struct HeadMass {
  std::vector<std::int64_t> slashes;  ///< [blocks of the segment]: mass on block diagonal d
  /// Keys of the segment that have mass.  One list where columns are chosen by their share; where
  /// budgets buy them one for each block of 64 queries that has observed ones.
  std::vector<std::vector<MassItem>> columns;
  std::vector<std::int64_t> query_block;  ///< [lists of columns] that block, where budgets buy
  std::int64_t total = 0;
};
/// Algorithm 1's choice of columns and slashes; the diagonal is always in (the sink block:
/// vertical_slash_pattern), so that no cap leaves it or the sink's columns out.
HeadChoice choose_vertical_slash(const HeadMass& mass, const AttentionOptions& options);

/// Pattern from a choice of whole pattern blocks of `block_tokens` keys (a multiple of 64) that
/// count from the segment's start. rows(head, query block of `blocks`, pattern block) is the word
/// of the 64 queries that use it; the block that a query lies in is always computed, later ones
/// never.
template <class Rows>
AttentionPattern block_pattern(std::span<const AxisRange> queries, const KeyAxis& axis, int heads,
                               std::int64_t block_tokens, Rows&& rows) {
  const std::vector<QueryBlock> blocks = query_blocks(queries, axis);
  const std::int64_t width = block_tokens / kBlock;
  PatternArrays x;
  x.visible = visible_keys(queries, axis);
  x.k_tokens = axis.tokens();
  x.index_heads = heads;
  x.run_offset.push_back(0);
  for (int h = 0; h < heads; ++h)
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const auto first = static_cast<std::int32_t>(axis.offset[blocks[b].segment] / kBlock);
      const std::int64_t own = blocks[b].block / width;
      const std::size_t start = x.runs.size();
      for (std::int64_t j = 0; j <= own; ++j) {
        const std::uint64_t word = j == own ? ~std::uint64_t{0} : rows(h, b, j);
        if (word == 0) continue;
        BlockRun run{
            static_cast<std::int32_t>(first + j * width),
            static_cast<std::int32_t>(first + std::min((j + 1) * width, blocks[b].block + 1)), -1};
        if (word != ~std::uint64_t{0}) {
          run.row_mask = static_cast<std::int32_t>(x.row_masks.size());
          x.row_masks.push_back(word);
        } else if (x.runs.size() > start && x.runs.back().row_mask < 0 &&
                   x.runs.back().last == run.first) {
          x.runs.back().last = run.last;
          continue;
        }
        x.runs.push_back(run);
      }
      x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    }
  return AttentionPattern(std::move(x));
}

}  // namespace ballast
