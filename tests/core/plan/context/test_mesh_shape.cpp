// Mesh shapes: numbering of ranks, problems with their arithmetic; memory estimate's limits.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

TEST(MeshShape, RankNumbersCountTpFastestAndDpSlowest) {
  std::mt19937 random(test_seed());
  for (int trial = 0; trial < 20; ++trial) {
    const auto degree = [&] { return 1 + static_cast<int>(random() % 3); };
    const MeshShape shape{degree(), degree(), degree(), degree(), degree(), degree(), 0};
    int rank = 0;
    for (int dp = 0; dp < shape.dp; ++dp)
      for (int pp = 0; pp < shape.pp; ++pp)
        for (int outer = 0; outer < shape.cp_outer; ++outer)
          for (int inner = 0; inner < shape.cp_inner; ++inner)
            for (int sp = 0; sp < shape.sp; ++sp)
              for (int tp = 0; tp < shape.tp; ++tp, ++rank) {
                const MeshCoordinates at{dp, pp, outer, inner, sp, tp};
                EXPECT_EQ(rank_of(shape, at), rank) << describe(shape);
                EXPECT_EQ(coordinates(shape, rank), at) << describe(shape);
                EXPECT_EQ(at.cp(shape), outer * shape.cp_inner + inner);
              }
    EXPECT_EQ(rank, shape.size());
    EXPECT_EQ(shape.replicas() * shape.pp * shape.tp, shape.size());
    EXPECT_TRUE(problems(shape, shape.size()).empty());
    EXPECT_TRUE(problems(shape, 0).empty());
    EXPECT_EQ(problems(shape, shape.size() + 1).size(), 1u);
    EXPECT_THROW(coordinates(shape, shape.size()), Error);
    EXPECT_THROW(coordinates(shape, -1), Error);
  }
}

TEST(MeshShape, ProblemsShowTheArithmetic) {
  const MeshShape shape{2, 1, 2, 2, 1, 1, 0};
  const auto list = problems(shape, 6);
  ASSERT_EQ(list.size(), 1u);
  const std::string text = list[0].message();
  EXPECT_NE(text.find("dp 2 x pp 1 x cp_outer 2 x cp_inner 2 x sp 1 x tp 1 = 8"), std::string::npos)
      << text;
  EXPECT_NE(text.find("started on 6"), std::string::npos) << text;
  EXPECT_EQ(describe(shape), "dp 2 x pp 1 x cp_outer 2 x cp_inner 2 x sp 1 x tp 1 = 8");
}

TEST(MeshShape, EveryBadDegreeIsNamed) {
  const auto list = problems({0, -1, 1, 0, 1, 1, -2}, 4);
  EXPECT_EQ(list.size(), 4u) << messages(list);
  EXPECT_EQ(problems({1 << 20, 1 << 20, 1, 1, 1, 1, 0}, 0).size(), 1u);
}

TEST(MeshShape, NodesHoldWholeInnerRings) {
  EXPECT_TRUE(problems({1, 1, 2, 4, 1, 1, 4}, 8).empty());
  EXPECT_FALSE(problems({1, 1, 2, 4, 1, 1, 2}, 8).empty());
  EXPECT_FALSE(problems({1, 1, 2, 2, 2, 1, 2}, 8).empty());  // the inner ring's ranks are sp apart
  EXPECT_TRUE(problems({1, 1, 1, 8, 1, 1, 2}, 8).empty());   // a flat ring may go over nodes
  EXPECT_TRUE(problems({1, 1, 2, 2, 1, 1, 16}, 4).empty());  // all on one node
  EXPECT_FALSE(problems({3, 1, 1, 2, 1, 1, 4}, 6).empty());  // 6 = 4 + 2
}

}  // namespace
}  // namespace ballast
