// Attention indexes of a given budget, made up: as many key blocks a query as a budget says, drawn
// at random.  For measuring what a budget costs, where random weights would route nothing sensibly.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"

namespace ballast {

/// Work of one segment: `query_tokens` queries after `prefix_tokens` stored keys; both multiples of
/// 64 where there is a budget.
struct BudgetSegment {
  std::int64_t query_tokens = 0, prefix_tokens = 0;
};

/// Segments one after the other on both axes, whose keys are one shard.  Errors: a segment without
/// tokens.
AttentionAxes budget_axes(const std::vector<BudgetSegment>& segments);

/// A pattern over these axes.  Every 64 queries of a head compute the pattern block
/// of `block_tokens` keys (a multiple of 64, counted from the segment's start) that they lie in,
/// and `budget` - 1 earlier ones drawn from (seed, head, query block); all of them where there are
/// no more.  budget 0: every visible key, one index head.  Errors: blocks, or lengths under a
/// budget, that are no multiples of 64.
AttentionPattern budgeted_pattern(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                                  std::int64_t block_tokens, int heads, std::uint64_t seed);

}  // namespace ballast
