// Schedules of data-parallel ranks that share some micro-batches and not others.
#pragma once
#include <vector>

#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/step_plan.hpp"

namespace ballast {

/// The list scheduler of order_step (core/plan/step_order): one schedule for each of `lanes`, and
/// the rounds of their micro-batches.  Rounds stay as given where every rank's backwards have them
/// ascending; else a micro-batch's round is one behind the last that a rank of its group has before
/// it.  `lanes` hold all ranks of the groups of their micro-batches.
std::vector<Schedule> schedule_shared(StepPlan& plan, const std::vector<int>& lanes,
                                      const PipelineOptions& options, const ScheduleCosts& costs);

}  // namespace ballast
