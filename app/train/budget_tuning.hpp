// Budgets of a training run (SparseBalance): the DST policy of every micro-batch, and the averages
// of final budgets by which batching.method = "sab" times samples.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "app/observe/step_statistics.hpp"
#include "core/base/device.hpp"
#include "core/config/config.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/latency_batching.hpp"
#include "core/predict/sparsity_tuning.hpp"

namespace ballast {

class BudgetTuning {
 public:
  /// Holds the profile table, where there is one, against `device`.
  BudgetTuning(const Config& config, const Device* device);

  /// Takes the targets of a step's plan; forgets the choices of the step before.
  void begin_step(const StepPlan& plan, int dp_rank);
  /// The policy of micro-batch `m` of this rank in this step; null without DST.
  BudgetPolicy* policy(int m);
  /// The base budget in every layer, for evaluation; null without DST.
  BudgetPolicy* base_policy() { return tune_ ? &base_ : nullptr; }

  /// This rank's choices: sums of final budgets and numbers of (sample, layer) pairs in each length
  /// bin, 2 * BudgetAverages::kBins values that are summed over all ranks.
  std::vector<double> bin_sums() const;
  /// Takes the sums over all ranks.
  void end_step(std::span<const double> sums);
  BudgetAverages& averages() { return averages_; }

  /// Of this rank's choices in this step; all 0 where there are none.
  BudgetFacts facts() const;
  /// JSON: [[micro-batch, layer, base budget, final budget, coverage loss]], a row a choice; ""
  /// where there are none.
  std::string choices() const;

  const std::vector<std::string>& notes() const { return notes_; }

 private:
  bool tune_;
  std::vector<std::string> notes_;
  DstOptions options_;
  FixedBudget base_;
  BudgetAverages averages_;
  std::vector<PlannedMicroBatch> mine_;
  int dp_rank_ = 0;
  std::map<int, std::unique_ptr<DstPolicy>> policies_;
};

}  // namespace ballast
