// simulate: the only clock of the program.  It times a StepPlan against Costs: a layer of a
// micro-batch over its group (layer_clock), the operations of lanes (lane_clock), then what all
// replicas do together.  Its cost grows with micro-batches x stages, not with ranks, layers or ring
// steps.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/lane_clock.hpp"
#include "core/predict/micro_batch_times.hpp"

namespace ballast {

/// Seconds of a step by what they are spent on, mean over all ranks; they add up to step_s.
struct StepTerms {
  double compute_s = 0, recompute_s = 0;
  double ring_s = 0;      ///< hops that no computation hides, and uneven parts of the ring's ranks
  double exchange_s = 0;  ///< Ulysses all-to-alls
  double bubble_s = 0;    ///< waits: for neighbour stages, for groups, for the slowest rank
  double reduction_s = 0, optimizer_s = 0, gather_s = 0;
  std::vector<std::pair<std::string, double>> list() const;  ///< with their names
};

/// Rank-seconds of pipelines, a lane and stage counted once: of a step, or of several, whose sums
/// the ratio is of.
struct PipelineSeconds {
  double useful_s = 0;    ///< of forward and backward
  double pipeline_s = 0;  ///< of lanes from their first computation to their last
  void add(const PipelineSeconds& other) {
    useful_s += other.useful_s, pipeline_s += other.pipeline_s;
  }
  double bubble_ratio() const { return pipeline_s > 0 ? 1 - useful_s / pipeline_s : 0; }
};

struct SimulatedStep {
  double step_s = 0;
  double schedule_s = 0;      ///< until the last operation of any lane
  PipelineSeconds pipelines;  ///< of all lanes
  double imbalance = 1;     ///< Equation 11 of SparseBalance: max / mean over micro-batches of the
                            ///< time averaged over their stages
  double load_balance = 1;  ///< POP: mean / max of useful seconds over all ranks
  int idle_ranks = 0;       ///< ranks of data-parallel ranks without any micro-batch
  double forward_max_s = 0, forward_mean_s = 0,
         forward_min_s = 0;  ///< of micro-batches, over stages
  StepTerms terms;
  SimulatedBudgets budgets;
  std::size_t recomputed = 0;            ///< recompute ops of the first stage, all lanes
  std::vector<int> live, weight_halves;  ///< [stage], of the lane that holds most
  /// [stage] Peak bytes by category, of the lane that needs most beside the largest pool; empty
  /// without options.memory.
  std::vector<MemoryEstimate> memory;
  std::vector<std::vector<LaneStage>> lanes;  ///< [dp][stage]
};

/// Deterministic in its arguments.  Errors: a plan that deadlocks, layers that do not suffice for
/// its stages.
SimulatedStep simulate(const StepPlan& plan, const SimulationOptions& options, const Costs& costs);

}  // namespace ballast
