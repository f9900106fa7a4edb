// Patterns that differ by head: by_head (a table) and flexprefill (chosen online).
#pragma once
#include <memory>
#include <vector>

#include "core/plan/attention/head_rules.hpp"
#include "kernels/attention/block_scores.hpp"
#include "kernels/attention/slash_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {

/// by_head: each head does what options.heads says (idea: MInference).  flexprefill (Lai et al.,
/// 2025): a head whose pooled queries and keys estimate what its last queries attend to takes, for
/// each block of 64 queries, the blocks of keys that hold options.flex_share of the estimate; the
/// others take columns and slashes that each hold that share of what the last queries attend to.
/// Different from the paper, the share counts for each block of queries rather than over all of
/// them.  Joined over the ring: what vertical_slash joins, keys summed over blocks of 64.
class HeadsSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  bool online() const { return options_.pattern == PatternKind::flexprefill; }
  /// The table's rules of a layer for this rank's heads; none where the choice is online.  Error: a
  /// table that lacks them.
  std::vector<HeadRule> rules(int layer, int heads) const;
  /// A window a segment, of which the last queries are observed.
  SlashSetup setup() const;
  void open(const AttentionInputs& in);
  /// Fills what heads by blocks take.  `observed`: the queries that the choice looks at.
  void choose_blocks(const AttentionInputs& in, const Tensor& observed, HeadChoices& choices);
  std::vector<HeadBudget> budgets(const HeadChoices& choices, const SlashCounts& counts,
                                  int heads) const;

  std::unique_ptr<SlashScores> slashes_;
  std::unique_ptr<BlockScores> blocks_;
  std::vector<std::int64_t> queries_;  ///< [segments]
  std::int64_t query_blocks_ = 0;      ///< on all ranks
};

}  // namespace ballast
