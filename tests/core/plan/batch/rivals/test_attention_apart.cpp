// The bound of core attention disaggregation, by hand.
#include <gtest/gtest.h>

#include "core/plan/batch/rivals/attention_apart.hpp"
#include "tests/core/plan/batch/rivals/placements.hpp"

namespace ballast {
namespace {

TEST(AttentionApart, EvenTokensAndEvenAttention) {
  const TestCosts costs;
  const auto options = options_of(4);
  const double attention_s = costs.attention_s(8000, 0, {}) + 8 * costs.attention_s(1000, 0, {}),
               rest_s = costs.rest_s(16000, {});
  std::vector<std::int64_t> lengths{8000};
  lengths.insert(lengths.end(), 8, 1000);
  const AttentionApart apart = attention_apart(samples_of(lengths), options, costs);
  EXPECT_NEAR(apart.even_s, (attention_s + rest_s) / 4, 1e-12);
  // The long document lies on two ranks, so all of it moves; the short ones' ranks have room.
  EXPECT_NEAR(apart.moved_share, costs.attention_s(8000, 0, {}) / attention_s, 1e-12);
  EXPECT_NEAR(apart.transfers_s, costs.exchange_token_s * 8000 / 4, 1e-12);
}

TEST(AttentionApart, WholeDocumentsMoveAsFarAsTheyAreAboveTheMean) {
  const TestCosts costs;
  std::vector<std::int64_t> lengths{4000};
  lengths.insert(lengths.end(), 4, 1000);
  const AttentionApart apart = attention_apart(samples_of(lengths), options_of(2), costs);
  const double one = costs.attention_s(4000, 0, {}), other = 4 * costs.attention_s(1000, 0, {});
  EXPECT_NEAR(apart.moved_share, (one - other) / 2 / (one + other), 1e-12);
  EXPECT_GT(apart.transfers_s, 0);
}

TEST(AttentionApart, NothingMovesWhereNothingIsUneven) {
  const TestCosts costs;
  const auto equal = attention_apart(samples_of({500, 500, 500, 500}), options_of(4), costs);
  EXPECT_EQ(equal.moved_share, 0);
  EXPECT_EQ(equal.transfers_s, 0);
  EXPECT_EQ(attention_apart({}, options_of(4), costs).even_s, 0);
}

}  // namespace
}  // namespace ballast
