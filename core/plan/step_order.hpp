// The order of a step's operations: one list scheduler over all lanes, micro-batches, stages and
// directions.
#pragma once
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/step_plan.hpp"

namespace ballast {

/// Fills plan.schedules, the lanes' schedules and the micro-batches' rounds.  Micro-batches, groups
/// and lanes are given; ids ascend in every lane.
///
/// Data-parallel ranks that share no micro-batch with others, or all of them, get the schedule of
/// their list (plan_schedule).  For the others one list scheduler orders the *operations*
/// (micro-batch, stage, direction; with gradients reduced by round, the collective of a round and
/// stage), an operation that several ranks share being one; each rank's list is that order
/// restricted to it.  So whatever waits waits for something earlier in one order, and no sharing
/// deadlocks.  The scheduler goes on at every moment: of the samples not yet through, the first in
/// the common order is next in every list that holds it, and the bounds of the schedules leave it
/// room (state_aware_schedule).
///
/// Where many ranks search (state_aware_schedule), each tries fewer orders; beyond 64 of them a
/// step's plan does not take longer than theirs.
/// `costs`: of ops whose micro_batch is an id of the plan.  `options.costs` are not read.
/// Errors: those of plan_schedule; ids that do not ascend in a lane.
void order_step(StepPlan& plan, const PipelineOptions& options, const ScheduleCosts& costs);

}  // namespace ballast
