// Plans of a run's steps, one value on all ranks: rank 0 plans, checks and broadcasts, and every
// rank holds what it sent, bit for bit.
#pragma once
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/plan/planned_run.hpp"
#include "app/train/session.hpp"
#include "core/plan/plan_step.hpp"

namespace ballast {

/// A step's plan and what goes with it.
struct PlannedStep {
  StepPlan plan;
  std::string text;       ///< the plan as JSON
  SamplerPosition after;  ///< of the sampler, once the step is done
  double planning_s = 0;  ///< of rank 0, also where it ran beside the step before
};

class StepPlanner {
 public:
  /// `costs`: of the deck, by which state-aware schedules are built, budgets tuned and samples
  /// balanced; null: as the deck states them, and plan_costs() for placement and tuning, which
  /// cannot do without.  Both must outlive it.  Collective.
  StepPlanner(Session& session, const Costs* costs);

  /// The plan of step `step`, whose samples begin at `position`; on rank 0 it may have been made
  /// while the step before ran, and the one after begins to be made, for a run of `steps` steps.
  /// Collective.  Errors, of all ranks together: what cannot be planned, a plan with problems(), a
  /// rank whose plan is not rank 0's.
  PlannedStep next(std::int64_t step, SamplerPosition position, std::int64_t steps);
  /// The forward pass over these samples.  Collective; errors as above.
  StepPlan evaluation(const std::vector<std::int64_t>& samples);
  /// The same over sequences of another dataset than the session's, one token of each with loss.
  StepPlan prompts(const std::vector<SampleLength>& sequences);

  /// What a step's plan needs of the step before; "" where steps are planned ahead.
  std::string waits_for() const;

 private:
  struct Draft {
    StepPlan plan;
    SamplerPosition after;
    double seconds = 0;
  };
  /// Draws the samples at once; the rest may run in another thread, without MPI and HDF5.
  std::function<Draft()> draft(std::int64_t step, SamplerPosition position);
  StepPlan forward(const std::vector<SampleLength>& samples, const StepOptions& options);
  PlannedStep share(std::function<Draft()> make);
  StepOptions options() const;

  Session& session_;
  std::shared_ptr<const Costs> own_costs_;  ///< where none were given
  const Costs* costs_;
  SimulationOptions simulation_;
  struct Ahead {
    std::int64_t step = 0;
    SamplerPosition position;
    std::future<Draft> draft;
  };
  std::optional<Ahead> ahead_;
};

}  // namespace ballast
