// Dynamic sparsity tuning against the step that is simulated, pipeline and placement included, in
// place of the mean latency alone.
#pragma once
#include <vector>

#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/micro_batch_times.hpp"

namespace ballast {

/// Targets by id of a plan that has its targets (of the mean) and schedules.  Those above the
/// anchor stay; those below it gain, one after the other, the largest candidate up to their own
/// target with which the simulated step takes no longer than it does while none of them gains.
std::vector<TuningTarget> path_targets(StepPlan plan, SimulationOptions options,
                                       const Costs& costs);

}  // namespace ballast
