// Learning-rate schedules against the values that their definitions give by hand.
#include <gtest/gtest.h>

#include "core/config/learning_rate.hpp"

namespace ballast {
namespace {

using enum LearningRateSchedule;

TEST(LearningRate, WarmUpThenCosine) {
  const LearningRate rate{cosine, 2.0, 0.5, 10, 110};
  EXPECT_DOUBLE_EQ(rate.at(1), 0.2);
  EXPECT_DOUBLE_EQ(rate.at(10), 2.0);
  EXPECT_DOUBLE_EQ(rate.at(60), 1.25);
  EXPECT_DOUBLE_EQ(rate.at(110), 0.5);
  EXPECT_DOUBLE_EQ(rate.at(500), 0.5);
  for (int step = 11; step < 110; ++step) EXPECT_LT(rate.at(step + 1), rate.at(step));
  const LearningRate at_once{cosine, 2.0, 0.0, 0, 100};
  EXPECT_LT(at_once.at(1), 2.0);
  EXPECT_GT(at_once.at(1), 1.99);
  EXPECT_DOUBLE_EQ((LearningRate{cosine, 2.0, 0.0, 5, 5}.at(5)), 2.0);
}

TEST(LearningRate, LinearFallsByTheSameEachStep) {
  const LearningRate rate{linear, 2.0, 0.5, 10, 110};
  EXPECT_DOUBLE_EQ(rate.at(5), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(10), 2.0);
  EXPECT_DOUBLE_EQ(rate.at(60), 1.25);
  EXPECT_DOUBLE_EQ(rate.at(35), 1.625);
  EXPECT_DOUBLE_EQ(rate.at(110), 0.5);
  EXPECT_DOUBLE_EQ(rate.at(111), 0.5);
}

TEST(LearningRate, ConstantKnowsNoEnd) {
  const LearningRate rate{constant, 2.0, 0.5, 4, 8};
  EXPECT_DOUBLE_EQ(rate.at(1), 0.5);
  for (const int step : {4, 8, 9, 1000}) EXPECT_DOUBLE_EQ(rate.at(step), 2.0);
}

TEST(LearningRate, WsdIsStableUntilItDecays) {
  const LearningRate rate{wsd, 2.0, 0.0, 10, 100, 20};
  EXPECT_DOUBLE_EQ(rate.at(5), 1.0);
  for (const int step : {10, 50, 80}) EXPECT_DOUBLE_EQ(rate.at(step), 2.0);
  EXPECT_DOUBLE_EQ(rate.at(85), 1.5);
  EXPECT_DOUBLE_EQ(rate.at(90), 1.0);
  EXPECT_DOUBLE_EQ(rate.at(100), 0.0);
}

}  // namespace
}  // namespace ballast
