// The clock of lanes on plans by hand: what runs beside what, and what waits.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/predict/lane_clock.hpp"
#include "core/predict/micro_batch_times.hpp"
#include "tests/core/predict/lane_plans.hpp"

namespace ballast {
namespace {

// Copies to the host and back have an engine each; what runs again waits for what it runs on.
TEST(LaneClock, ARecomputationWaitsForItsFetchWhichWaitsForNoOffload) {
  StepPlan plan = plan_of({of_lengths({1, 1})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 1);
  plan.schedules[0].stages[0] = {
      {OpKind::forward, 0}, {OpKind::offload, 0},   {OpKind::forward, 1},  {OpKind::offload, 1},
      {OpKind::fetch, 0},   {OpKind::recompute, 0}, {OpKind::backward, 0}, {OpKind::backward, 1}};
  MicroBatchTimes times;
  times.forward.push_back({.compute_s = 4});
  times.backward.push_back({.compute_s = 8});
  times.weight_s.push_back(2);
  times.host_copy_s = 6;
  const auto shared = std::make_shared<const MicroBatchTimes>(times);
  const std::vector<std::shared_ptr<const MicroBatchTimes>> both{shared, shared};
  const LaneStage stage = run_lanes({plan, both, {}})[0][0];
  std::vector<double> begins, ends;
  for (const TimedOp& timed : stage.ops)
    begins.push_back(timed.begin_s), ends.push_back(timed.end_s);
  // The second offload waits for the first; the fetch begins at once.
  EXPECT_EQ(begins, (std::vector<double>{0, 4, 4, 10, 8, 14, 18, 26}));
  EXPECT_EQ(ends, (std::vector<double>{4, 10, 8, 16, 14, 18, 26, 34}));
}

}  // namespace
}  // namespace ballast
