// How joined ranks share heads and tokens.
#include <gtest/gtest.h>

#include "core/plan/context/context_split.hpp"

namespace ballast {
namespace {

TEST(ContextSplit, RanksThatDivideTheHeadsShareThemAndARingTakesTheRest) {
  const MeshShape row{.dp = 24};
  EXPECT_EQ(joined_split(row, 1, 4), (ContextSplit{1, 1, 1}));
  EXPECT_EQ(joined_split(row, 3, 4), (ContextSplit{1, 1, 3}));
  EXPECT_EQ(joined_split(row, 4, 4), (ContextSplit{4, 1, 1}));
  EXPECT_EQ(joined_split(row, 6, 4), (ContextSplit{2, 1, 3}));
  EXPECT_EQ(joined_split(row, 8, 14), (ContextSplit{2, 1, 4}));
  EXPECT_EQ(joined_split(row, 12, 28), (ContextSplit{4, 1, 3}));
  EXPECT_EQ(joined_split(row, 24, 0), (ContextSplit{24, 1, 1}));
}

TEST(ContextSplit, TheRingOfTheMeshIsInside) {
  EXPECT_EQ(joined_split({.dp = 6, .cp_inner = 2}, 6, 4), (ContextSplit{2, 1, 6}));
  EXPECT_EQ(joined_split({.dp = 6, .cp_outer = 2, .cp_inner = 2}, 6, 4), (ContextSplit{2, 6, 2}));
  EXPECT_EQ(joined_split({.dp = 6, .cp_outer = 3}, 1, 4), (ContextSplit{1, 3, 1}));
  EXPECT_EQ(joined_split({.dp = 4, .sp = 2}, 4, 4), (ContextSplit{4, 1, 2}));
  for (int ranks = 1; ranks <= 48; ++ranks)
    for (const int heads : {1, 2, 12, 14, 28, 64}) {
      const MeshShape mesh{.dp = ranks, .cp_outer = 2, .cp_inner = 3};
      const ContextSplit split = joined_split(mesh, ranks, heads);
      EXPECT_EQ(split.ranks(), ranks * mesh.cp());
      EXPECT_EQ(heads % split.sp, 0);
    }
}

}  // namespace
}  // namespace ballast
