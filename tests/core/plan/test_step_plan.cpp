// StepPlan: accessors, hash, and what problems() finds.
#include <gtest/gtest.h>

#include <functional>

#include "core/plan/step_plan.hpp"
#include "core/plan/step_problems.hpp"
#include "tests/core/plan/step_plans.hpp"

namespace ballast {
namespace {

StepPlan plan_of_two() {
  StepPlan plan = test::placed(2, 2, {{0, 2}, {0, 1}, {1, 1}, {0, 2}}, {128, 64, 32, 16});
  PipelineOptions options;
  options.stages = 2;
  test::schedule_alone(plan, options);
  return plan;
}

TEST(StepPlan, Accessors) {
  const StepPlan plan = plan_of_two();
  EXPECT_EQ(plan.tokens(), 240);
  EXPECT_EQ(plan.samples(), 4);
  EXPECT_EQ(plan.rounds(), 4);
  EXPECT_EQ(plan.idle_lanes(), 0);
  EXPECT_DOUBLE_EQ(plan.attention_pairs(),
                   128 * 129 / 2. + 64 * 65 / 2. + 32 * 33 / 2. + 16 * 17 / 2.);
  const auto list = plan.list(1);
  ASSERT_EQ(list.size(), 3u);
  EXPECT_EQ(list[0].sp, 2);
  EXPECT_EQ(list[1].segments[0].sample, 2);
  EXPECT_EQ(plan.micro_batch(1, 1).segments[0].tokens(), 32);
  EXPECT_EQ(plan.layout(plan.micro_batches[0]).tokens(), 128);
  EXPECT_EQ(plan.layout(plan.micro_batches[0]).ranks(), 1);
}

// As many tokens are not as much work: one sample of 64K attends to 16 times what 16 of 4K do.
TEST(StepPlan, LanesAreInStepByTokensAndPairs) {
  StepPlan plan = test::placed(2, 1, {{0, 1}, {1, 1}}, {65536, 65536});
  EXPECT_TRUE(plan.lanes_in_step());
  plan.micro_batches[1].segments.clear();
  for (std::int64_t i = 0; i < 16; ++i) plan.micro_batches[1].segments.push_back({i, 0, 4096, 1});
  EXPECT_FALSE(plan.lanes_in_step());
  plan.micro_batches[0].segments = plan.micro_batches[1].segments;
  EXPECT_TRUE(plan.lanes_in_step());
  plan.micro_batches[0].segments.pop_back();
  EXPECT_FALSE(plan.lanes_in_step());
}

TEST(StepPlan, EveryFieldReachesTheHash) {
  StepPlan plan = plan_of_two();
  plan.collectives = {{CollectiveKind::gradient_reduce, 1, -1, 7}};
  const std::uint64_t hash = plan.hash();
  EXPECT_EQ(StepPlan(plan).hash(), hash);
  const std::vector<std::function<void(StepPlan&)>> changes{
      [](StepPlan& p) { p.step = 1; },
      [](StepPlan& p) { p.mesh.dp = 3; },
      [](StepPlan& p) { p.mesh.pp = 3; },
      [](StepPlan& p) { p.mesh.cp_outer = 2; },
      [](StepPlan& p) { p.mesh.cp_inner = 2; },
      [](StepPlan& p) { p.mesh.sp = 2; },
      [](StepPlan& p) { p.mesh.tp = 2; },
      [](StepPlan& p) { p.mesh.ranks_per_node = 2; },
      [](StepPlan& p) { p.ep = 2; },
      [](StepPlan& p) { p.zero = 1; },
      [](StepPlan& p) { p.backward = false; },
      [](StepPlan& p) { p.normaliser = LossNormaliser::sum; },
      [](StepPlan& p) { ++p.loss_tokens; },
      [](StepPlan& p) { p.layer_begin[1] = 2; },
      [](StepPlan& p) { p.layouts[0].kind = LayoutKind::striped; },
      [](StepPlan& p) { p.layouts[0].stripe = 1; },
      [](StepPlan& p) { p.layouts[0].align = 64; },
      [](StepPlan& p) { p.micro_batches[0].segments[0].sample = 9; },
      [](StepPlan& p) { p.micro_batches[0].segments[0].begin = 9; },
      [](StepPlan& p) { p.micro_batches[0].segments[0].end = 9; },
      [](StepPlan& p) { p.micro_batches[0].segments[0].loss_tokens = 9; },
      [](StepPlan& p) { p.micro_batches[2].group.first = 0; },
      [](StepPlan& p) { p.micro_batches[0].group.ranks = 1; },
      [](StepPlan& p) { p.micro_batches[0].split.sp = 1; },
      [](StepPlan& p) { p.micro_batches[0].split.ring_outer = 2; },
      [](StepPlan& p) { p.micro_batches[0].split.ring_inner = 2; },
      [](StepPlan& p) { p.micro_batches[0].layout = 1; },
      [](StepPlan& p) { p.micro_batches[0].round = 1; },
      [](StepPlan& p) { p.micro_batches[0].chunk = 1; },
      [](StepPlan& p) { p.micro_batches[0].recompute_layers = 1; },
      [](StepPlan& p) { p.micro_batches[0].align = 64; },
      [](StepPlan& p) { p.micro_batches[0].loss_weight = 1e-300; },
      [](StepPlan& p) { p.micro_batches[0].tuning.base_budget = 1; },
      [](StepPlan& p) { p.micro_batches[0].tuning.anchor_budget = 1; },
      [](StepPlan& p) { p.micro_batches[0].tuning.above_anchor = true; },
      [](StepPlan& p) { p.schedules[1].stages[0][0].micro_batch = 1; },
      [](StepPlan& p) { p.lanes[0].schedule = 1; },
      [](StepPlan& p) { std::swap(p.lanes[0].micro_batches[0], p.lanes[0].micro_batches[1]); },
      [](StepPlan& p) { p.collectives[0].kind = CollectiveKind::tied_sum; },
      [](StepPlan& p) { p.collectives[0].stage = 0; },
      [](StepPlan& p) { p.collectives[0].after_round = 0; },
      [](StepPlan& p) { p.collectives[0].elements = 8; }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    StepPlan changed = plan;
    changes[i](changed);
    EXPECT_NE(changed.hash(), hash) << "change " << i;
  }
}

TEST(StepProblems, NoneInASoundPlan) { EXPECT_EQ(problems(plan_of_two()), ""); }

TEST(StepProblems, NamesWhatIsWrong) {
  const auto wrong = [](const std::function<void(StepPlan&)>& change) {
    StepPlan plan = plan_of_two();
    change(plan);
    return problems(plan);
  };
  const auto expect = [&](const std::string& part, const std::function<void(StepPlan&)>& change) {
    const std::string text = wrong(change);
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
  };
  expect("lanes for mesh.dp", [](StepPlan& p) { p.lanes.pop_back(); });
  expect("first layers of 1 stages", [](StepPlan& p) { p.layer_begin.pop_back(); });
  expect("on stage 2 of 2", [](StepPlan& p) { p.collectives = {{CollectiveKind::optimizer, 2}}; });
  expect("after round 4 of 4", [](StepPlan& p) {
    p.collectives = {{CollectiveKind::gradient_reduce, 0, 4}};
  });
  expect("has no segments", [](StepPlan& p) { p.micro_batches[0].segments.clear(); });
  expect("of mesh.dp = 2", [](StepPlan& p) { p.micro_batches[0].group = {1, 2}; });
  expect("over 2 ranks", [](StepPlan& p) { p.micro_batches[0].split.sp = 1; });
  expect("layout 1 is none", [](StepPlan& p) { p.micro_batches[0].layout = 1; });
  expect("schedule 2 is none", [](StepPlan& p) { p.lanes[0].schedule = 2; });
  expect("micro-batch 4 is none", [](StepPlan& p) { p.lanes[0].micro_batches[0] = 4; });
  expect("stands twice", [](StepPlan& p) { p.lanes[0].micro_batches[0] = 1; });
  expect("is not of its group", [](StepPlan& p) { p.lanes[0].micro_batches[1] = 2; });
  expect("1 of the 2 ranks", [](StepPlan& p) { p.lanes[0].micro_batches.pop_back(); });
  expect("has not the chunk before it", [](StepPlan& p) {
    p.micro_batches[1].segments[0] = {0, 128, 192, 64};
  });
  expect("has not the chunk before it", [](StepPlan& p) {
    p.micro_batches[3].segments[0] = {7, 128, 192, 64};
  });
  expect("3 of 3", [](StepPlan& p) { p.schedules[0].stages[0][0].micro_batch = 3; });
  expect("forwards of micro-batch",
         [](StepPlan& p) { p.schedules[0].stages[0].erase(p.schedules[0].stages[0].begin()); });
  expect("without its counterpart",
         [](StepPlan& p) { p.schedules[0].stages[0].erase(p.schedules[0].stages[0].begin() + 1); });
  expect("not yet computed", [](StepPlan& p) {
    auto& ops = p.schedules[0].stages[0];
    std::swap(ops[1], ops[3]);
  });
  expect("which sent another one first", [](StepPlan& p) {
    auto& ops = p.schedules[0].stages[1];  // recv, forward, backward, send of 0; the same of 1
    std::rotate(ops.begin(), ops.begin() + 4, ops.begin() + 8);
  });
  expect("a backward of round 1 ends after 0 collectives", [](StepPlan& p) { p.zero = 2; });
  expect("in a plan of forwards", [](StepPlan& p) { p.backward = false; });
}

TEST(StepProblems, ForwardsAlone) {
  StepPlan plan = plan_of_two();
  plan.backward = false;
  plan.schedules = {forward_schedule({{0}, {1}, {2}}, 2)};
  plan.lanes[0].schedule = plan.lanes[1].schedule = 0;
  EXPECT_EQ(problems(plan), "");
}

// Two stages, 1F1B, data-parallel rank 0: x, p, y; rank 1: x, y; x and y shared.  Stage 0 of rank 0
// runs one forward ahead: x p | x's backward | y.  That of rank 1 wants y before x's backward.
TEST(StepProblems, FindsTheDeadlockOfListsMadeAlone) {
  StepPlan plan = test::placed(2, 2, {{0, 2}, {0, 1}, {0, 2}});
  PipelineOptions options;
  options.stages = 2;
  test::schedule_alone(plan, options);
  for (const Schedule& s : plan.schedules) EXPECT_EQ(problems(s), "");
  const std::string text = problems(plan);
  EXPECT_NE(text.find("the step deadlocks"), std::string::npos) << text;
  EXPECT_NE(text.find("data-parallel rank 0 stage 0: backward of micro-batch 0 with ranks 0 to 1"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("data-parallel rank 1 stage 0: forward of micro-batch 2 with ranks 0 to 1"),
            std::string::npos)
      << text;
}

// A reduction after each round, which a rank joins also where it has no micro-batch in it.
TEST(StepProblems, CollectivesOfRoundsMeetAllRanks) {
  StepPlan plan = test::placed(2, 1, {{0, 2}, {0, 1}, {0, 2}});
  plan.zero = 2;
  plan.lanes[1].schedule = 1;
  const auto lists = [](std::vector<Op> first, std::vector<Op> second) {
    return std::vector<Schedule>{{{std::move(first)}}, {{std::move(second)}}};
  };
  const auto forward = [](int m) { return Op{OpKind::forward, m}; };
  const auto backward = [](int m) { return Op{OpKind::backward, m}; };
  const auto reduce = [](int round) { return Op{OpKind::collective, round}; };
  const std::vector<Op> first{forward(0), backward(0), reduce(0),   forward(1), backward(1),
                              reduce(1),  forward(2),  backward(2), reduce(2)};
  plan.schedules = lists(
      first, {forward(0), backward(0), reduce(0), reduce(1), forward(1), backward(1), reduce(2)});
  EXPECT_EQ(problems(plan), "");
  // Rank 1 wants the last micro-batch before the reduction that rank 0 waits at.
  plan.schedules = lists(
      first, {forward(0), backward(0), reduce(0), forward(1), reduce(1), backward(1), reduce(2)});
  EXPECT_NE(problems(plan).find("data-parallel rank 0 stage 0: collective of round 1"),
            std::string::npos);
  plan.schedules = lists(
      first, {forward(0), backward(0), reduce(0), forward(1), backward(1), reduce(1), reduce(2)});
  EXPECT_NE(problems(plan).find("a backward of round 2 ends after 1 collectives"),
            std::string::npos);
}

}  // namespace
}  // namespace ballast
