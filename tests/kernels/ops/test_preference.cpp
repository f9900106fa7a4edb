// The sigmoid preference loss against its definition, its slope against differences, and its
// limits.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "kernels/ops/preference.hpp"

namespace ballast {
namespace {

TEST(Preference, LossIsItsDefinition) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> draw(-40, 0);
  for (const double smoothing : {0.0, 0.1, 0.4})
    for (int i = 0; i < 50; ++i) {
      const PairLogProbabilities policy{draw(random), draw(random)},
          reference{draw(random), draw(random)};
      const double beta = 0.3;
      const auto loss = [&](double chosen, double rejected) {
        const double m = beta * ((chosen - rejected) - (reference.chosen - reference.rejected));
        return (1 - smoothing) * std::log(1 + std::exp(-m)) + smoothing * std::log(1 + std::exp(m));
      };
      const PairLoss pair = sigmoid_preference_loss(policy, reference, beta, smoothing);
      EXPECT_NEAR(pair.loss, loss(policy.chosen, policy.rejected), 1e-12 * (1 + pair.loss));
      EXPECT_NEAR(pair.chosen_reward, beta * (policy.chosen - reference.chosen), 1e-12);
      const double h = 1e-4;
      EXPECT_NEAR(
          pair.slope,
          (loss(policy.chosen + h, policy.rejected) - loss(policy.chosen - h, policy.rejected)) /
              (2 * h),
          1e-8);
      EXPECT_NEAR(
          -pair.slope,
          (loss(policy.chosen, policy.rejected + h) - loss(policy.chosen, policy.rejected - h)) /
              (2 * h),
          1e-8);
    }
}

TEST(Preference, FarMarginsStayFinite) {
  const PairLoss wrong = sigmoid_preference_loss({-1e6, 0}, {}, 1, 0);
  EXPECT_DOUBLE_EQ(wrong.loss, 1e6);
  EXPECT_DOUBLE_EQ(wrong.slope, -1);
  const PairLoss right = sigmoid_preference_loss({0, -1e6}, {}, 1, 0);
  EXPECT_EQ(right.loss, 0);
  EXPECT_EQ(right.slope, 0);
  EXPECT_DOUBLE_EQ(sigmoid_preference_loss({-3, -3}, {-5, -5}, 0.1, 0).loss, std::log(2));
}

}  // namespace
}  // namespace ballast
