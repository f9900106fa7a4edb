// What plan_step asks of Costs: durations that schedules are built by, and targets of dynamic
// sparsity tuning.
#pragma once
#include <vector>

#include "core/plan/pipeline/schedule.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/micro_batch_times.hpp"

namespace ballast {

/// Durations of ops whose micro_batch is an id of the plan, which has no schedules yet; at the base
/// budget, whose coverage nobody needs to know.
ScheduleCosts schedule_costs(const StepPlan& plan, const SimulationOptions& options,
                             const Costs& costs);

/// SparseBalance Algorithm 1, line 1 to 4: anchor and targets by id, by a stage's first layer as it
/// is recomputed.
std::vector<TuningTarget> tuning_targets(const StepPlan& plan, const SimulationOptions& options,
                                         const Costs& costs);

}  // namespace ballast
