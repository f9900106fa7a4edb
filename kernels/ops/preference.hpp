// The sigmoid loss of direct preference optimization (Rafailov et al., arXiv 2305.18290, Equation
// 7; label smoothing: Mitchell, "A note on DPO with noisy preferences"), in fp64 on the host: a few
// numbers a pair.
#pragma once

namespace ballast {

/// Summed log probabilities of a pair's answers.
struct PairLogProbabilities {
  double chosen = 0, rejected = 0;
};

struct PairLoss {
  double loss = 0;
  /// Derivative of the loss by the log probability of the chosen answer; that by the rejected one
  /// is its negative.
  double slope = 0;
  double chosen_reward = 0, rejected_reward = 0;  ///< beta x (log probability - the reference's)
  double margin() const { return chosen_reward - rejected_reward; }
};

/// loss = -(1 - e) ln sigmoid(m) - e ln sigmoid(-m) of the margin m between the rewards, e the
/// label smoothing.
PairLoss sigmoid_preference_loss(const PairLogProbabilities& policy,
                                 const PairLogProbabilities& reference, double beta,
                                 double label_smoothing);

}  // namespace ballast
