// Patterns by head: parameters that are none, choices of static rules, divergence by definition.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/base/error.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

TEST(HeadRules, ParametersBelongToTheirPattern) {
  EXPECT_EQ(problems(HeadRule{}), "");
  EXPECT_EQ(problems(HeadRule{HeadPattern::a_shape, 64, 256}), "");
  EXPECT_EQ(problems(HeadRule{HeadPattern::vertical_slash, 0, 0, 0, 1}), "");
  EXPECT_EQ(problems(HeadRule{HeadPattern::block_sparse, 0, 0, 0, 0, 3}), "");
  EXPECT_NE(problems(HeadRule{HeadPattern::dense, 64}), "");
  EXPECT_NE(problems(HeadRule{HeadPattern::a_shape, 64, 0}), "");
  EXPECT_NE(problems(HeadRule{HeadPattern::a_shape, 100, 256}), "");
  EXPECT_NE(problems(HeadRule{HeadPattern::vertical_slash, 0, 0, 8, 0}), "");
  EXPECT_NE(problems(HeadRule{HeadPattern::vertical_slash, 0, 0, -1, 2}), "");
  EXPECT_NE(problems(HeadRule{HeadPattern::block_sparse, 0, 0, 4, 0, 3}), "");
  EXPECT_EQ(to_text(HeadRule{HeadPattern::a_shape, 64, 256}), "a_shape sink 64 window 256");
  EXPECT_THROW(HeadTable(2, 4).at(2, 0), Error);
  EXPECT_THROW(HeadTable(2, 4).at(1, 4), Error);
  EXPECT_THROW(HeadTable(0, 4), Error);
}

TEST(HeadRules, ChoicesOfARule) {
  EXPECT_EQ(choose_by_rule({}, nullptr, 130).slashes, (std::vector<std::int32_t>{0, 1, 2}));
  const VerticalSlash shape = choose_by_rule({HeadPattern::a_shape, 128, 128}, nullptr, 1000);
  EXPECT_EQ(shape.slashes, (std::vector<std::int32_t>{0, 1}));
  ASSERT_EQ(shape.columns.size(), 64u) << "the first block is computed as the sink";
  EXPECT_EQ(shape.columns.front(), 64);
  EXPECT_EQ(choose_by_rule({HeadPattern::a_shape, 128, 1024}, nullptr, 100).columns.size(), 36u);
  EXPECT_EQ(choose_by_rule({HeadPattern::a_shape, 128, 1024}, nullptr, 100).slashes.size(), 2u);
  HeadMass mass;
  mass.slashes = {1, 5, 0, 7};
  mass.columns = {{{3, 4}, {100, 6}, {200, 3}}};
  mass.total = 13;
  const VerticalSlash top = choose_by_rule({HeadPattern::vertical_slash, 0, 0, 2, 2}, &mass, 256);
  EXPECT_EQ(top.slashes, (std::vector<std::int32_t>{0, 1, 3})) << "the diagonal is always in";
  EXPECT_EQ(top.columns, (std::vector<std::int64_t>{3, 100}));
  EXPECT_TRUE(
      choose_by_rule({HeadPattern::vertical_slash, 0, 0, 0, 1}, &mass, 256).columns.empty());
  EXPECT_THROW(choose_by_rule({HeadPattern::vertical_slash, 0, 0, 0, 1}, nullptr, 256), Error);
}

TEST(HeadRules, DivergenceIsThatOfItsDefinition) {
  EXPECT_NEAR(divergence({1, 2, 3}, {2, 4, 6}), 0, 1e-8);
  EXPECT_NEAR(divergence({1, 0}, {0, 5}), std::sqrt(std::log(2.0)), 1e-12);
  EXPECT_EQ(divergence({0, 0}, {1, 1}), 0);
  EXPECT_THROW(divergence({1}, {1, 1}), Error);
  std::mt19937_64 random(test_seed());
  std::vector<double> p(20), q(20);
  double all_p = 0, all_q = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    all_p += p[i] = static_cast<double>(random() % 1000);
    all_q += q[i] = static_cast<double>(random() % 1000);
  }
  const auto entropy = [](double x) { return x > 0 ? -x * std::log(x) : 0.0; };
  double expected = 0;  // of the mean, less the mean of both
  for (std::size_t i = 0; i < p.size(); ++i)
    expected += entropy((p[i] / all_p + q[i] / all_q) / 2) - entropy(p[i] / all_p) / 2 -
                entropy(q[i] / all_q) / 2;
  EXPECT_NEAR(divergence(p, q), std::sqrt(expected), 1e-12);
}

}  // namespace
}  // namespace ballast
