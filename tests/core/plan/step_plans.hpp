// StepPlans made by hand: micro-batches of one sample each on given groups, schedules by a builder.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/step_plan.hpp"

namespace ballast::test {

/// A plan without schedules and collectives: micro-batch m is sample m of `tokens[m]` tokens on
/// groups[m]; ids ascend in every lane.
inline StepPlan placed(int dp, int stages, const std::vector<RankGroup>& groups,
                       std::vector<std::int64_t> tokens = {}) {
  tokens.resize(groups.size(), 64);
  StepPlan plan;
  plan.mesh.dp = dp;
  plan.mesh.pp = stages;
  plan.layer_begin.resize(static_cast<std::size_t>(stages));
  for (int s = 0; s < stages; ++s) plan.layer_begin[static_cast<std::size_t>(s)] = s;
  plan.layouts.push_back({LayoutKind::zigzag, 64, 1});
  plan.lanes.resize(static_cast<std::size_t>(dp));
  for (std::size_t m = 0; m < groups.size(); ++m) {
    PlannedMicroBatch micro_batch;
    micro_batch.segments = {{static_cast<std::int64_t>(m), 0, tokens[m], tokens[m]}};
    micro_batch.group = groups[m];
    micro_batch.split.sp = groups[m].ranks;
    micro_batch.round = static_cast<int>(m);
    plan.loss_tokens += tokens[m];
    plan.micro_batches.push_back(micro_batch);
    for (int d = groups[m].first; d < groups[m].first + groups[m].ranks; ++d)
      plan.lanes[static_cast<std::size_t>(d)].micro_batches.push_back(static_cast<int>(m));
  }
  return plan;
}

/// Each lane's schedule by its own list alone, as if nothing were shared.
inline void schedule_alone(StepPlan& plan, const PipelineOptions& options) {
  plan.schedules.clear();
  for (int d = 0; d < plan.mesh.dp; ++d) {
    plan.lanes[static_cast<std::size_t>(d)].schedule = d;
    plan.schedules.push_back(plan_schedule(plan.list(d), options));
  }
}

}  // namespace ballast::test
