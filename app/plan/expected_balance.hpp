// How evenly a step is expected to load all ranks, in one sentence with what to do about it: the
// same in `check` and in the log of `train`.
#pragma once
#include <string>

#include "core/config/config.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/simulate.hpp"

namespace ballast {

/// Idle ranks and POP's load balance (mean / max of useful seconds) over all ranks of the mesh;
/// where ranks are idle or a fifth of the time is lost, a remedy in terms of the deck's keys.
std::string expected_balance(const Config& config, const StepPlan& plan, const SimulatedStep& step);

}  // namespace ballast
