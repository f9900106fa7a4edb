// Times of a micro-batch on every stage: layers with the budgets that tuning gives them, and the
// head.  Coverage is what only a run can know; a plan draws it from stated curves.
// Source: SparseBalance Sections III and V, Figure 4.
#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/model/recompute_options.hpp"
#include "core/plan/batch/latency_batching.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/layer_clock.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/predict/sparsity_tuning.hpp"

namespace ballast {

/// What Muon adds to a stage's update on the rank that has most of it.
struct MuonCost {
  double flops = 0;        ///< of its matrices' orthogonalisation
  std::int64_t moved = 0;  ///< elements of them that other ranks hold: they come and go back
};

/// Forward passes between steps (ForwardPasses), of all lanes.
struct PlannedPasses {
  std::shared_ptr<const StepPlan> plan;
  AfterSteps when;
};

/// What a plan's times depend on beside the plan and the costs.
struct SimulationOptions {
  std::int64_t layers = 1;  ///< of the model
  RecomputeOptions recompute{};
  std::int64_t base_budget = 0;  ///< of micro-batches without a target; 0: every visible key
  bool tune = false;             ///< micro-batches have targets, which DST turns into budgets
  DstOptions dst{};
  std::int64_t block_tokens = 64;  ///< tokens of the key blocks that budgets count
  /// Coverage of a sample in a layer reaches 90 % of what its visible blocks hold at one of these
  /// budgets, drawn for each (step, sample, layer); SparseBalance Figure 4 shows 10, 36 and 50.
  std::vector<std::int64_t> coverage_blocks{10, 36, 50};
  std::uint64_t seed = 0;
  bool keep_ops = true;  ///< SimulatedStep::lanes holds the times of every operation
  std::vector<StageMemory>
      memory{};  ///< [stage] what peak bytes are replayed with; empty: none are
  std::vector<PlannedPasses> between{};  ///< forward passes that grow pools beside steps
  std::vector<MuonCost> muon{};          ///< [stage]; empty with another optimizer
  /// [stage] what is reduced and gathered at a time; empty: all, beside nothing.
  std::vector<std::vector<ParameterBucket>> buckets{};
};

/// C(k) of `tokens` tokens whose coverage follows 1 - 10^(-k / blocks90), as a share of what their
/// visible blocks hold; 1 where all are computed.
double simulated_coverage(std::int64_t tokens, std::int64_t budget, std::int64_t blocks90,
                          std::int64_t block_tokens);

/// Budgets of all layers and micro-batches of a step.
struct SimulatedBudgets {
  double mean_budget = 0, mean_coverage_loss = 0, largest_coverage_loss = 0;
  std::vector<double> sums, counts;  ///< of (sample, layer) in each length bin, for BudgetAverages
};

struct MicroBatchTimes {
  std::vector<PassParts> forward, backward;  ///< [stage], the head in the last
  std::vector<double> weight_s;              ///< [stage] of backward: what its weight half takes
  /// Of the head with its loss, in the last stage's forward: it runs its backward at once.
  double head_s = 0;
  std::vector<double> stage_hops_s;  ///< [stage] between it and the next one
  double host_copy_s = 0;
  /// Between neighbours, in either direction.
  double stage_hop_s(int stage, int peer) const;
  double forward_s() const;  ///< mean over the stages
  double backward_s() const;
};

class MicroBatchClock {
 public:
  /// All must outlive it.  Errors: layers that do not suffice for the plan's stages, tuning without
  /// coverage blocks.
  MicroBatchClock(const StepPlan& plan, const SimulationOptions& options, const Costs& costs);
  /// Of micro-batch `id`; equal shapes are worked out once, unless they are tuned.
  std::shared_ptr<const MicroBatchTimes> times(int id);
  /// Of all micro-batches asked for.
  SimulatedBudgets budgets() const;

 private:
  std::int64_t stage_layers(std::size_t stage) const;
  MicroBatchTimes untuned(const PlannedMicroBatch& micro_batch);
  MicroBatchTimes tuned(const PlannedMicroBatch& micro_batch);
  void finish(const PlannedMicroBatch& micro_batch, MicroBatchTimes& times) const;
  std::vector<double> coverage(const PlannedMicroBatch& micro_batch, std::int64_t layer) const;
  void count(const PlannedMicroBatch& micro_batch, std::int64_t budget, double layers);

  const StepPlan& plan_;
  const SimulationOptions& options_;
  const Costs& costs_;
  LayerClock layer_;
  std::vector<Link> stage_links_;  ///< [stage] to the next one
  std::unordered_map<std::uint64_t, std::shared_ptr<const MicroBatchTimes>> known_;
  SimulatedBudgets facts_;
  double choices_ = 0, budget_sum_ = 0, loss_sum_ = 0;
};

}  // namespace ballast
