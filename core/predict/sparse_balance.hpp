// One training step with sparsity-aware batches and dynamic sparsity tuning, simulated: predicted
// latencies, made-up coverage curves, the 1F1B pipeline of every data-parallel rank.  Source:
// SparseBalance Sections III and V, Equation 11, Table I.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/latency_batching.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/profile_table.hpp"
#include "core/predict/sparsity_tuning.hpp"

namespace ballast {

struct SparseBalanceOptions {
  int stages = 1;
  std::int64_t layers = 1;  ///< of the whole model; every stage has layers / stages of them, the
                            ///< first ones one more where that leaves some
  bool tune = false;        ///< DST; without it every layer has the base budget
  DstOptions dst;
  /// Coverage of a sample in a layer reaches 90 % of what its visible blocks hold at one of these
  /// budgets, drawn for each (step, sample, layer); SparseBalance Figure 4 shows 10, 36 and 50.
  std::vector<std::int64_t> coverage_blocks{10, 36, 50};
  std::uint64_t seed = 0;
};

struct SimulatedStep {
  double step_time_s = 0;  ///< of the slowest data-parallel rank
  double imbalance =
      1;  ///< Equation 11 over all micro-batches, each with its time averaged over the stages
  double bubble_ratio = 0;  ///< of all ranks, until the slowest one ends
  double forward_max_s = 0, forward_mean_s = 0,
         forward_min_s = 0;  ///< micro-batches' forward, averaged over the stages (Figure 3)
  double mean_budget = 0, mean_coverage_loss = 0,
         largest_coverage_loss = 0;  ///< over layers and micro-batches
  std::vector<double> budget_sums,
      budget_counts;  ///< of (sample, layer) in each length bin, for BudgetAverages::update
};

/// C(k) of `tokens` tokens whose coverage follows 1 - 10^(-k / blocks90), as a share of what their
/// visible blocks hold; 1 where all are computed.
double simulated_coverage(std::int64_t tokens, std::int64_t budget, std::int64_t blocks90,
                          std::int64_t block_tokens);

/// Deterministic in its arguments.  Error: stages or layers below 1, no coverage blocks.
SimulatedStep simulate_step(const Batch& batch, const LatencyModel& model,
                            const SparseBalanceOptions& options);

}  // namespace ballast
