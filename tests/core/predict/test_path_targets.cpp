// Targets of dynamic sparsity tuning by the simulated step.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/predict/path_targets.hpp"
#include "core/predict/simulate.hpp"
#include "core/predict/stated_costs.hpp"
#include "core/predict/step_costs.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

/// Two data-parallel ranks of two stages, micro-batches of random lengths in 1F1B.
StepPlan drawn_plan(std::mt19937_64& random) {
  PipelineOptions pipeline;
  pipeline.schedule = ScheduleKind::one_f_one_b;
  pipeline.stages = 2;
  StepPlan plan;
  plan.mesh.dp = plan.mesh.pp = 2;
  plan.layouts.push_back({LayoutKind::zigzag, 64, 1});
  plan.layer_begin = balance_stages(4, 2, {});
  for (int d = 0; d < 2; ++d) {
    PlannedLane& lane = plan.lanes.emplace_back();
    std::vector<MicroBatch> list;
    for (int i = 0; i < 5; ++i) {
      const auto tokens = static_cast<std::int64_t>(256 + random() % 16000);
      list.push_back({{{5 * d + i, 0, tokens, 0}}});
      PlannedMicroBatch& planned = plan.micro_batches.emplace_back();
      planned.segments = list.back().segments;
      planned.group = {d, 1};
      lane.micro_batches.push_back(static_cast<int>(plan.micro_batches.size()) - 1);
    }
    lane.schedule = d;
    plan.schedules.push_back(plan_schedule(list, pipeline));
  }
  return plan;
}

TEST(PathTargets, GainsThatTheSimulatedStepDoesNotFeel) {
  std::mt19937_64 random(test_seed());
  StatedTimes times;
  times.token_s = 1e-6;
  times.pair_s = 1e-9;
  const StatedCosts costs(times);
  SimulationOptions options;
  options.layers = 4;
  options.tune = true;
  options.base_budget = 32;
  options.dst = {Anchor::path, 0.1, 32, default_candidates(32)};
  int gained = 0, held_back = 0, limited = 0;
  for (int round = 0; round < 20; ++round) {
    StepPlan plan = drawn_plan(random);
    const std::vector<TuningTarget> mean = tuning_targets(plan, options, costs);
    for (std::size_t i = 0; i < mean.size(); ++i) plan.micro_batches[i].tuning = mean[i];
    const std::vector<TuningTarget> path = path_targets(plan, options, costs);
    ASSERT_EQ(path.size(), mean.size());
    SimulationOptions reached = options;
    reached.dst.threshold = 1;  // coverage holds nothing back
    const auto step_s = [&](const std::vector<TuningTarget>& targets) {
      for (std::size_t i = 0; i < targets.size(); ++i) plan.micro_batches[i].tuning = targets[i];
      return simulate(plan, reached, costs).step_s;
    };
    std::vector<TuningTarget> none = mean;
    for (TuningTarget& target : none)
      if (!target.above_anchor)
        target.anchor_budget = std::min(target.anchor_budget, target.base_budget);
    const double least_s = step_s(none);
    EXPECT_LE(step_s(path), least_s * (1 + 1e-9));
    // The one with the most room takes what it can before any other gains.
    std::size_t first = mean.size();
    for (std::size_t i = 0; i < mean.size(); ++i)
      if (!mean[i].above_anchor && mean[i].anchor_budget > 32 &&
          (first == mean.size() || mean[i].anchor_budget > mean[first].anchor_budget))
        first = i;
    if (first < mean.size() && path[first].anchor_budget < mean[first].anchor_budget) {
      std::vector<TuningTarget> alone = none;
      alone[first].anchor_budget = *std::upper_bound(
          options.dst.candidates.begin(), options.dst.candidates.end(), path[first].anchor_budget);
      EXPECT_GT(step_s(alone), least_s * (1 + 1e-9)) << "micro-batch " << first;
      ++limited;
    }
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (mean[i].above_anchor || mean[i].anchor_budget <= 32) {
        EXPECT_EQ(path[i], mean[i]);
        continue;
      }
      EXPECT_GE(path[i].anchor_budget, 32);
      EXPECT_LE(path[i].anchor_budget, mean[i].anchor_budget);
      gained += path[i].anchor_budget > 32;
      if (path[i].anchor_budget == mean[i].anchor_budget) continue;
      ++held_back;
      std::vector<TuningTarget> more = path;
      more[i].anchor_budget = *std::upper_bound(
          options.dst.candidates.begin(), options.dst.candidates.end(), path[i].anchor_budget);
      EXPECT_GT(step_s(more), least_s * (1 + 1e-9)) << "micro-batch " << i << " could gain more";
    }
  }
  EXPECT_GT(gained, 0);
  EXPECT_GT(held_back, 0);
  EXPECT_GT(limited, 0);
}

}  // namespace
}  // namespace ballast
