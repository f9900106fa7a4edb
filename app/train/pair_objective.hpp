// Direct preference optimization on one rank: from the token losses of a micro-batch of pairs to
// the loss of each pair and the weights that give its gradient, and the reference that both go by.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "app/observe/step_statistics.hpp"
#include "core/base/tensor.hpp"
#include "core/config/config.hpp"
#include "core/plan/batch/batch.hpp"
#include "kernels/ops/preference.hpp"
#include "parallel/comm/mesh.hpp"

namespace ballast {

/// Sums over pairs; means() of the global batch once every rank's are added.
struct PairSums {
  double pairs = 0, loss = 0, chosen_reward = 0, rejected_reward = 0;
  double right = 0;  ///< pairs whose chosen answer has the higher reward
  double chosen_log_probability = 0, rejected_log_probability = 0;
  static constexpr std::size_t kNumbers = 7;
  std::vector<double> numbers() const;
  static PairSums from(const double* numbers);
  void add(const PairLoss& pair, const PairLogProbabilities& policy);
  /// Everything over `pairs`; zero without pairs.
  PairSums means() const;
};

/// Of means, as a step shows them.
PairFigures pair_figures(const PairSums& means);

class PairObjective {
 public:
  /// `reference`: [sample] log probabilities; empty: all 0.
  PairObjective(const DpoConfig& config, const Mesh& mesh,
                std::vector<PairLogProbabilities> reference);

  /// [segment of the micro-batch] minus the sum of its tokens' losses, on every rank that shares
  /// it. `segment`: [T] of this rank's tokens, as LocalBatch has it. Collective over the ranks of
  /// the micro-batch's ring and Ulysses group.
  std::vector<double> log_probabilities(const MicroBatch& micro_batch,
                                        const std::vector<std::int32_t>& segment,
                                        const Tensor& token_loss) const;
  /// LocalBatch::weigh of a micro-batch, in `type`; what it finds is added to `sums`.
  Tensor weigh(const MicroBatch& micro_batch, const std::vector<std::int32_t>& segment,
               const Tensor& token_loss, PairSums& sums) const;
  /// The same without weights, for evaluation.  Collective likewise.
  void judge(const MicroBatch& micro_batch, const std::vector<std::int32_t>& segment,
             const Tensor& token_loss, PairSums& sums) const;
  /// Whether this rank speaks for the micro-batch's group.
  bool speaks(const MicroBatch& micro_batch) const;

 private:
  /// [pair of the micro-batch]
  std::vector<PairLoss> losses(const MicroBatch& micro_batch, const std::vector<double>& policy,
                               PairSums& sums) const;
  double beta_, label_smoothing_;
  const Mesh& mesh_;
  std::vector<PairLogProbabilities> reference_;
};

}  // namespace ballast
