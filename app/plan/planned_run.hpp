// A deck's run as it is planned: its steps one after another, each a StepPlan timed by the one
// clock.  All tables of `ballast plan` and `ballast pack` come from here.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "app/plan/planned_samples.hpp"
#include "core/base/error.hpp"
#include "core/config/config.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/batch/latency_batching.hpp"
#include "core/plan/plan_step.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/simulate.hpp"

namespace ballast {

/// What the deck's plans are timed by: its profile table, else what block costs states, else
/// built-in rates of the backend's device.  A deck without a model and without costs takes 1 us a
/// token.  `notes`: what the table's checks say, and which pairs of a sparse pattern are not known.
/// Errors: those of load_profile and read_indexes.
std::shared_ptr<const Costs> plan_costs(const Config& config, std::vector<std::string>& notes);

/// Whether the deck names a profile table or states_times().
bool has_costs(const Config& config);

/// No rank can take such a step: its samples or its batch.
class UnplannableStep : public Error {
  using Error::Error;
};

class PlannedRun {
 public:
  /// `costs`: of this deck; tuning and batching are those of the deck.
  PlannedRun(const Config& config, std::shared_ptr<const Costs> costs);
  PlannedRun(const PlannedRun&) = delete;
  PlannedRun& operator=(const PlannedRun&) = delete;

  /// Steps from now on hold the times of every operation.
  void keep_ops() { simulation_.keep_ops = true; }
  /// What step_memory and run_memory replay the steps' memory with: the deck's evaluations, the
  /// texts written at these and measurements of drift come between them.
  SimulationOptions memory_options() const;

  /// From the first step again, batches made by `batching`, with or without tuning, at the deck's
  /// base budget.
  void begin(const BatchingOptions& batching, bool tune);

  struct Step {
    StepPlan plan;
    SimulatedStep simulated;
    double planned_s = 0;  ///< wall time of assigning the batch
  };
  /// The next step; averages of budgets that batches are made by follow it.  Errors:
  /// UnplannableStep, and others of what it is timed by.
  Step next();

  const SimulationOptions& simulation() const { return simulation_; }

 private:
  const Config& config_;
  std::shared_ptr<const Costs> costs_;
  RunOptions options_;
  SimulationOptions simulation_;
  BatchingOptions batching_;
  std::unique_ptr<PlannedSamples> samples_;
  SamplerPosition position_;
  BudgetAverages averages_;
  std::int64_t step_ = 0;
};

/// Steps of a run whose memory is counted at most, and micro-batches after which no further step
/// is.
constexpr std::size_t kCountedSteps = 256, kCountedMicroBatches = 8192;

/// Sums of a run's steps, as its tables show them.
struct RunFacts {
  double step_s = 0, schedule_s = 0;
  PipelineSeconds pipelines;
  double load_balance = 0, idle_ranks = 0;  ///< sums of the steps'
  std::int64_t steps = 0;
  std::size_t micro_batches = 0, recomputed = 0;
  std::vector<int> live;  ///< [stage] most live activations
  void add(const PlannedRun::Step& step);
  double mean(double sum) const { return steps > 0 ? sum / static_cast<double>(steps) : 0; }
  double mean_step_s() const { return mean(step_s); }
};
/// The first `count` steps of a deck.
RunFacts first_steps(const Config& config, std::shared_ptr<const Costs> costs, std::int64_t count);

}  // namespace ballast
