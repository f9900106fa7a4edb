#include "kernels/ops/preference.hpp"

#include <algorithm>
#include <cmath>

namespace ballast {
namespace {

/// ln sigmoid(x), without overflow.
double log_sigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

}  // namespace

PairLoss sigmoid_preference_loss(const PairLogProbabilities& policy,
                                 const PairLogProbabilities& reference, double beta,
                                 double label_smoothing) {
  PairLoss pair;
  pair.chosen_reward = beta * (policy.chosen - reference.chosen);
  pair.rejected_reward = beta * (policy.rejected - reference.rejected);
  const double margin = pair.margin();
  pair.loss = -(1 - label_smoothing) * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin);
  // d ln sigmoid(m) / dm = sigmoid(-m).
  pair.slope = beta * (label_smoothing * std::exp(log_sigmoid(margin)) -
                       (1 - label_smoothing) * std::exp(log_sigmoid(-margin)));
  return pair;
}

}  // namespace ballast
