// What is wrong with a StepPlan: its values, and whether its lanes can run at all.
#pragma once
#include <string>

#include "core/plan/step_plan.hpp"

namespace ballast {

/// Checks the values of a plan, then replays all lanes at once: an op of a micro-batch that several
/// data-parallel ranks share begins when every one of them has come to it (a blocking meeting of
/// the stage's ranks), a receive waits for its send, a send waits while kTransfersAhead of its
/// payload are not yet received, a collective waits for all data-parallel ranks of its stage.
/// Returns what is wrong: a deadlock with the ops that wait for one another, a micro-batch missing
/// from or standing twice in a lane of its group, a schedule that is not well formed, a place
/// outside a list, a split that is not the group's, chunks of a sample on different groups; empty
/// when the step can run.
std::string problems(const StepPlan& plan);

}  // namespace ballast
