// Sparsity-aware batching: one global batch over data-parallel ranks and then into micro-batches,
// by predicted latency; and the averages of final budgets that the prediction takes.  Source:
// SparseBalance Section IV-C, Algorithm 2.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

/// Algorithm 2 with weights W[i] of the samples: bins for data-parallel ranks, then each rank's
/// into micro-batches.  The number of micro-batches of every rank is ceil(samples /
/// (micro_batch_samples dp)) or, with options.micro_batch_samples = 0, the smallest that keeps
/// packs of several samples within micro_batch_tokens.  Samples and micro-batches keep the given
/// (random) order.  Empty micro-batches are left out.  Errors: as balanced_partition,
/// and weights of 0 that leave several samples in a micro-batch too long.
Batch plan_weighted(std::int64_t step, const std::vector<SampleLength>& samples,
                    std::span<const double> weights, const BatchingOptions& options);

/// Exponential moving average of final budgets in each length bin (powers of two tokens).
class BudgetAverages {
 public:
  static constexpr int kBins = 40;
  /// Every bin begins with `base`; `decay` in [0, 1) is the weight of the past at each step with
  /// samples of the bin.
  BudgetAverages(double base, double decay) : decay_(decay), average_(kBins, base) {}
  static int bin(std::int64_t tokens);
  double budget(std::int64_t tokens) const {
    return average_[static_cast<std::size_t>(bin(tokens))];
  }
  /// One step: sums of final budgets and numbers of (sample, layer) pairs in each bin, over all
  /// ranks.
  void update(std::span<const double> sums, std::span<const double> counts);
  /// For checkpoints.
  const std::vector<double>& values() const { return average_; }
  void restore(std::vector<double> values);

 private:
  double decay_;
  std::vector<double> average_;
};

}  // namespace ballast
