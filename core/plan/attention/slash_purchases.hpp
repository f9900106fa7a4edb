// What budgets buy of a vertical-slash pattern: one order of purchases, which gives both the
// coverage that a BudgetPolicy is told and the pattern that is built.  A pure function of the
// observed mass, in fixed point.  Source: SparseBalance Equation 4, for MTraining's pattern.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/attention/vertical_slash.hpp"

namespace ballast {

/// Purchases of one head and segment.  The sink block and the diagonal come first; they count as
/// two blocks, and a budget of 1 has them too.  Every further block of 64 keys a query row is a
/// slash or the 64 heaviest columns, whichever adds the greater mass to what is computed already:
/// a pair counts once.  Slashes come before columns of equal mass, lower numbers before higher.
/// Nothing that is left adding mass, slashes are bought in their order.
class SlashPurchases {
 public:
  /// `mass` lists all columns that have any; `budgets` ascend.  options.max_columns caps the
  /// columns of a head.
  SlashPurchases(const HeadMass& mass, const std::vector<std::int64_t>& budgets,
                 const AttentionOptions& options);
  /// [budgets] share of the observed mass on pairs that choice() computes, in kCoverageUnit; 1
  /// where nothing was observed.
  const std::vector<std::int64_t>& coverage() const { return coverage_; }
  /// Of budgets[i]; the sink block comes on top (vertical_slash_pattern).
  VerticalSlash choice(std::size_t i) const;

 private:
  struct Bought {
    std::size_t slashes = 0, columns = 0;
  };
  std::vector<std::int32_t> slashes_;  ///< in the order of purchase
  std::vector<std::int64_t> columns_;
  std::vector<Bought> bought_;  ///< [budgets] the first so many of either
  std::vector<std::int64_t> coverage_;
};

}  // namespace ballast
