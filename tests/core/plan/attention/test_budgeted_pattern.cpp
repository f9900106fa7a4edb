// Random blocks that stand for a budget in profiles: as many as the budget says.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/plan/attention/budgeted_pattern.hpp"
namespace ballast {
namespace {

TEST(BudgetedPattern, RowsListAsManyBlocksAsTheBudget) {
  constexpr std::int64_t kTokens = 4096, kBlocks = kTokens / 64;
  for (const std::int64_t budget : {1, 2, 7, 40}) {
    const AttentionPattern pattern = budgeted_pattern({{kTokens, 0}}, budget, 64, 3, 5);
    // (b + 1) blocks where there are no more; the own one is half visible.
    double pairs = 0;
    for (std::int64_t b = 0; b < kBlocks; ++b)
      pairs += static_cast<double>((std::min(budget, b + 1) - 1) * 64 * 64 + 64 * 65 / 2);
    EXPECT_DOUBLE_EQ(pattern.pairs_per_head(), pairs) << budget;
  }
}

}  // namespace
}  // namespace ballast
