// The one clock: levels against hand-worked examples and against the clock of single schedules.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/presets.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/predict/simulate.hpp"
#include "core/predict/stated_costs.hpp"
#include "core/predict/step_memory.hpp"
#include "tests/core/predict/lane_plans.hpp"

namespace ballast {
namespace {

TEST(Simulate, ChunkFlowSection3And4) {
  // Four stages: four equal micro-batches; lengths 4, 2, 1, 1; two equal chunks.
  for (const auto& [lengths, bubble, step_s] :
       {std::tuple{std::vector<std::int64_t>{2, 2, 2, 2}, 3.0 / 7, 42.0},
        {std::vector<std::int64_t>{4, 2, 1, 1}, 4.0 / 7, 56.0},
        {std::vector<std::int64_t>{4, 4}, 0.6, 60.0}}) {
    const StepPlan plan =
        plan_of({of_lengths(lengths)}, pipeline_of(ScheduleKind::one_f_one_b, 4), 7);
    const SimulatedStep step = simulate(plan, {.layers = 7}, unit_costs());
    EXPECT_NEAR(step.pipelines.bubble_ratio(), bubble, 1e-12);
    EXPECT_NEAR(step.step_s, step_s, 1e-9);
  }
}

// Every schedule over random packs and chunks: op by op what the clock of one schedule says.
TEST(Simulate, IsTheClockOfOneScheduleWhereLanesAreAlone) {
  std::mt19937_64 random(20261122);
  for (int trial = 0; trial < 60; ++trial) {
    const int stages = 1 + static_cast<int>(random() % 4), k = 1 + static_cast<int>(random() % 3);
    const ScheduleKind schedule = std::vector<ScheduleKind>{
        ScheduleKind::gpipe, ScheduleKind::one_f_one_b, ScheduleKind::state_aware_1f1b,
        ScheduleKind::zero_bubble}[trial % 4];
    std::vector<MicroBatch> list = of_lengths({1 + static_cast<std::int64_t>(random() % 9), 3});
    for (std::int64_t c = 0, chunks = random() % 5; c < chunks; ++c)
      list.push_back({{{7, 4 * c, 4 * c + 4, 0}}});
    PipelineOptions pipeline = pipeline_of(schedule, stages, k);
    pipeline.search = 4;
    pipeline.costs.hop_token_s = 0.125;
    const StepPlan plan = plan_of({list}, pipeline, stages + 2);
    const SimulatedStep step = simulate(plan, {.layers = stages + 2}, unit_costs(0.125));
    const SimulatedSchedule alone =
        simulate(plan.schedules[0], schedule_costs(pipeline.costs, list));
    EXPECT_NEAR(step.step_s, alone.step_time_s, 1e-9) << schedule;
    EXPECT_NEAR(step.pipelines.bubble_ratio(), alone.bubble_ratio, 1e-9);
    EXPECT_EQ(step.live, alone.peak_live_activations);
    EXPECT_EQ(step.weight_halves, alone.peak_weight_halves);
    for (int s = 0; s < stages; ++s) {
      const auto& ops = step.lanes[0][static_cast<std::size_t>(s)].ops;
      const auto& expected = alone.stages[static_cast<std::size_t>(s)];
      ASSERT_EQ(ops.size(), expected.size());
      for (std::size_t i = 0; i < ops.size(); ++i) {
        EXPECT_EQ(ops[i].op, expected[i].op);
        EXPECT_NEAR(ops[i].begin_s, expected[i].begin_s, 1e-9);
        EXPECT_NEAR(ops[i].end_s, expected[i].end_s, 1e-9);
      }
    }
  }
}

// Two ranks: a micro-batch of 4 tokens of rank 0 alone, then one of 6 that both share.
TEST(Simulate, RanksOfAGroupBeginASharedMicroBatchTogether) {
  StepPlan plan;
  plan.mesh.dp = 2;
  plan.layouts.push_back({});
  plan.micro_batches.resize(2);
  plan.micro_batches[0].segments = {{0, 0, 4, 0}};
  plan.micro_batches[1].segments = {{1, 0, 6, 0}};
  plan.micro_batches[1].group = {0, 2};
  plan.micro_batches[1].split = {2, 1, 1};
  const PipelineOptions pipeline = pipeline_of(ScheduleKind::one_f_one_b, 1);
  plan.schedules = {plan_schedule(of_lengths({4, 6}), pipeline),
                    plan_schedule(of_lengths({6}), pipeline)};
  plan.lanes = {{{0, 1}, 0}, {{1}, 1}};
  const SimulatedStep step = simulate(plan, {.layers = 1}, unit_costs());
  // Rank 0: 4 + 8, then both: 6 / 2 forward, twice that backward.
  EXPECT_DOUBLE_EQ(step.step_s, 12 + 3 + 6);
  EXPECT_DOUBLE_EQ(step.lanes[1][0].ops.front().begin_s, 12);
  EXPECT_DOUBLE_EQ(step.pipelines.useful_s, 12 + 9 + 9);
  EXPECT_DOUBLE_EQ(step.load_balance, (21 + 9) / 2.0 / 21);
  EXPECT_DOUBLE_EQ(step.terms.bubble_s, 6);
  // Each waits for the other's micro-batch.
  plan.micro_batches[0].group = {0, 2};
  plan.lanes = {{{0, 1}, 0}, {{1, 0}, 0}};
  plan.schedules[0] = plan_schedule(of_lengths({4, 6}), pipeline);
  try {
    simulate(plan, {.layers = 1}, unit_costs());
    FAIL() << "it deadlocks";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("lane 1 stage 0: forward of micro-batch 1"),
              std::string::npos)
        << e.what();
  }
}

TEST(Simulate, RingHopsHideBehindAttentionAndSumsAndExchangesDoNot) {
  // Contiguous zigzag of equal parts: no rank has more.
  const StepPlan plan = plan_of({of_lengths({4096})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 2,
                                {.sp = 2, .ring_outer = 1, .ring_inner = 4});
  RingTimes costs;
  const SimulatedStep step = simulate(plan, {.layers = 2}, costs);
  const RingPlan ring = plan_ring(0, 1, 4);
  const double forward = simulate(ring.forward, {.compute_s = 2, .inner_hop_s = 3}),
               backward = simulate(ring.backward,
                                   {.compute_s = 4, .inner_hop_s = 3, .inner_dkv_hop_s = 3});
  EXPECT_GT(forward, 8);
  EXPECT_NEAR(step.lanes[0][0].ops[0].end_s, 2 * (5 + forward + 0.25 + 0.5) + 3,
              1e-3);  // the head's backward follows its loss at once
  EXPECT_NEAR(step.terms.ring_s, 2 * (forward - 8 + 0.25 + backward - 16 + 0.75), 1e-2);
  EXPECT_DOUBLE_EQ(step.terms.exchange_s, 2 * 2 * 0.5);
  EXPECT_DOUBLE_EQ(step.terms.compute_s, 2 * (5 + 10 + 8 + 16) + 3);
}

TEST(Simulate, UnevenLayoutsTakeTheTimeOfTheFullestRank) {
  const StatedCosts costs = unit_costs();
  StepPlan plan = plan_of({of_lengths({1 << 16})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 1,
                          {.sp = 1, .ring_outer = 1, .ring_inner = 4});
  LayerClock zigzag(plan, costs);
  EXPECT_NEAR(zigzag.uneven(plan.micro_batches[0]), 1, 1e-4);
  plan.layouts[0].kind = LayoutKind::contiguous;
  // The last of four ranks has 7 / 16 of the pairs.
  LayerClock contiguous(plan, costs);
  EXPECT_NEAR(contiguous.uneven(plan.micro_batches[0]), 7.0 / 4, 1e-4);
  // Packed: two samples, each on two ranks.
  plan.micro_batches[0].segments = packed({1 << 15, 1 << 15}).segments;
  LayerClock two(plan, costs);
  EXPECT_NEAR(two.uneven(plan.micro_batches[0]), 3.0 / 2, 1e-4);
}

// A budget evens out what layouts spread unevenly, and recomputation goes round the ring again.
TEST(Simulate, RingsUnderBudgetsAndRecomputation) {
  StepPlan plan = plan_of({of_lengths({4096})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 2,
                          {.sp = 1, .ring_outer = 1, .ring_inner = 4});
  RingTimes costs;
  SimulationOptions options{.layers = 2};
  const auto ring_s = [&] { return simulate(plan, options, costs).terms.ring_s; };
  const RingPlan ring = plan_ring(0, 1, 4);
  const double forward = simulate(ring.forward, {.compute_s = 2, .inner_hop_s = 3}) - 8 + 0.25,
               backward = simulate(ring.backward,
                                   {.compute_s = 4, .inner_hop_s = 3, .inner_dkv_hop_s = 3}) -
                          16 + 0.75;
  EXPECT_NEAR(ring_s(), 2 * (forward + backward), 1e-2);
  options.recompute.mode = Recompute::full;
  EXPECT_NEAR(ring_s(), 2 * (2 * forward + backward), 1e-2);
  options.base_budget = 8;
  const double zigzag = ring_s();
  plan.layouts[0].kind = LayoutKind::contiguous;
  EXPECT_DOUBLE_EQ(ring_s(), zigzag);
  options.base_budget = 0;
  EXPECT_GT(ring_s(), 1.1 * zigzag);
}

TEST(Simulate, CollectivesFollowTheLastLaneAndTermsAddUp) {
  const PipelineOptions pipeline = pipeline_of(ScheduleKind::one_f_one_b, 2);
  StepPlan plan = plan_of({of_lengths({1, 1}), of_lengths({1})}, pipeline, 4);
  RingTimes costs;
  const double before = simulate(plan, {.layers = 4}, costs).step_s;
  plan.zero = 1;
  plan.collectives = {
      {CollectiveKind::gradient_reduce, 0, -1, 100}, {CollectiveKind::gradient_reduce, 1, -1, 100},
      {CollectiveKind::gradient_norm, 0, -1, 1},     {CollectiveKind::optimizer, 0, -1, 10},
      {CollectiveKind::optimizer, 1, -1, 6},         {CollectiveKind::parameter_gather, 0, -1, 100},
      {CollectiveKind::parameter_gather, 1, -1, 100}};
  const SimulatedStep step = simulate(plan, {.layers = 4}, costs);
  // Stage 0 ends last; two replicas share its ten elements.
  EXPECT_DOUBLE_EQ(step.step_s, before + 7 + 5 + 11);
  EXPECT_DOUBLE_EQ(step.schedule_s, before);
  double sum = 0;
  for (const auto& [name, seconds] : step.terms.list()) sum += seconds;
  EXPECT_NEAR(sum, step.step_s, 1e-9);
  EXPECT_DOUBLE_EQ(step.terms.optimizer_s, (5 + 3) / 2.0);
  EXPECT_GE(step.terms.bubble_s, 0);
  // Useful: 78 and 81 a micro-batch on the two stages, the update on every lane.
  EXPECT_DOUBLE_EQ(step.load_balance, (3 * (78 + 81) + 2 * (5 + 3)) / 4.0 / (2 * 81 + 3));
}

// Where two stages hold an embedding its gradient is summed in full, which ZeRO 2 keeps as fp32.
TEST(Simulate, TheTiedSumOfZero2IsOfFullGradients) {
  StepPlan plan =
      plan_of({of_lengths({1}), of_lengths({1})}, pipeline_of(ScheduleKind::one_f_one_b, 2), 4);
  plan.collectives = {{CollectiveKind::tied_sum, 0, -1, 100}};
  for (plan.zero = 0; plan.zero <= 2; ++plan.zero)
    EXPECT_DOUBLE_EQ(simulate(plan, {.layers = 4}, RingTimes()).terms.reduction_s,
                     plan.zero == 2 ? 9 : 7);
}

// Three chunks of a sample, two of which run forward twice, the head once: a layer takes 13 and 26,
// the head 3 on the last of two stages.
TEST(Simulate, ChunksThatRunAgainCountOnceMoreWithoutTheHead) {
  const StepPlan plan = plan_of({{{{{7, 0, 4, 0}}}, {{{7, 4, 8, 0}}}, {{{7, 8, 12, 0}}}}},
                                pipeline_of(ScheduleKind::state_aware_1f1b, 2), 2);
  const SimulatedStep step = simulate(plan, {.layers = 2}, RingTimes());
  EXPECT_EQ(step.recomputed, 2);
  const double once = 13 + 1.5 + 26, twice = once + 13;
  EXPECT_DOUBLE_EQ(step.imbalance, twice / ((once + 2 * twice) / 3));
  std::map<OpKind, std::vector<double>> last;  // stage
  for (const TimedOp& timed : step.lanes[0][1].ops)
    last[timed.op.kind].push_back(timed.end_s - timed.begin_s);
  EXPECT_EQ(last[OpKind::forward], (std::vector<double>{13, 13, 16}));
  EXPECT_EQ(last[OpKind::recompute], (std::vector<double>{16, 16}));
}

// Coverage of a packed micro-batch is the mean of its samples' by their tokens.
TEST(Simulate, CoverageWeighsSamplesByTheirTokens) {
  StepPlan plan = plan_of({{packed({2048, 63488})}}, pipeline_of(ScheduleKind::one_f_one_b, 1), 1);
  plan.micro_batches[0].tuning = {64, 8, true};
  SimulationOptions options{.layers = 1, .base_budget = 64, .tune = true};
  options.dst.base_budget = 64;
  options.dst.candidates = default_candidates(64);
  options.coverage_blocks = {36};
  const auto coverage = [](std::int64_t budget) {
    return (2048 * simulated_coverage(2048, budget, 36, 64) +
            63488 * simulated_coverage(63488, budget, 36, 64)) /
           65536;
  };
  const double least = coverage(64) - options.dst.threshold;
  const std::int64_t kept =
      *std::find_if(options.dst.candidates.begin(), options.dst.candidates.end(),
                    [&](std::int64_t budget) { return coverage(budget) >= least; });
  ASSERT_GT(kept, 8);
  const SimulatedStep step = simulate(plan, options, unit_costs());
  EXPECT_EQ(step.budgets.mean_budget, kept);
  EXPECT_NEAR(step.budgets.largest_coverage_loss, coverage(64) - coverage(kept), 1e-12);
}

// Embedding and first layer of six equal buckets are final when backward ends, and are needed when
// forward begins; passes hide the others.
TEST(Simulate, PassesHideTheirPartOfReductionsAndGathers) {
  const PipelineOptions pipeline = pipeline_of(ScheduleKind::one_f_one_b, 1);
  StepPlan plan = plan_of({of_lengths({1, 1}), of_lengths({1, 1})}, pipeline, 4);
  RingTimes costs;
  SimulationOptions options{.layers = 4};
  std::vector<ParameterBucket>& buckets = options.buckets.emplace_back(6);
  for (std::size_t b = 0; b < 6; ++b) {
    buckets[b].elements = 10;
    buckets[b].final_at = b == 5 ? kHeadLayer : static_cast<std::int64_t>(b) - 1;
  }
  const double before = simulate(plan, options, costs).step_s;
  plan.zero = 1;
  plan.collectives = {{CollectiveKind::gradient_reduce, 0, -1, 60},
                      {CollectiveKind::parameter_gather, 0, -1, 60}};
  SimulatedStep step = simulate(plan, options, costs);
  EXPECT_DOUBLE_EQ(step.terms.reduction_s, 7 * 2 / 6.0);
  EXPECT_DOUBLE_EQ(step.terms.gather_s, 11 * 2 / 6.0);
  EXPECT_DOUBLE_EQ(step.step_s, before + 18 * 2 / 6.0);
  // So do ranks that are not in step, except under ZeRO 2.
  const StepPlan even = plan;
  plan.micro_batches.back().segments = {{2, 0, 2, 0}};
  EXPECT_FALSE(plan.lanes_in_step());
  EXPECT_DOUBLE_EQ(simulate(plan, options, costs).terms.reduction_s, 7);
  plan.zero = 2;
  EXPECT_TRUE(plan.meets_in_backward());
  plan = even;
  // Ranks with some micro-batches in common reduce when all is done.
  plan.micro_batches[1].group = {0, 2};
  plan.micro_batches[1].split = {2, 1, 1};
  plan.lanes[1] = {{1, 2}, plan.lanes[1].schedule};
  plan.micro_batches.pop_back();
  EXPECT_FALSE(plan.meets_in_backward());
  step = simulate(plan, options, costs);
  EXPECT_DOUBLE_EQ(step.terms.reduction_s, 7);
}

// ZeRO 2: both ranks reduce after each backward, so that the rank with one micro-batch waits.
TEST(Simulate, RoundsOfCollectivesMeetAllReplicas) {
  StepPlan plan =
      plan_of({of_lengths({2, 2}), of_lengths({1})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 1);
  plan.zero = 2;
  plan.micro_batches[1].round = 1;
  const Op reduce{OpKind::collective, 0}, reduce_next{OpKind::collective, 1};
  std::vector<Op>& first = plan.schedules[0].stages[0];  // forward, backward of 0; the same of 1
  first.insert(first.begin() + 2, reduce);
  first.push_back(reduce_next);
  std::vector<Op>& second = plan.schedules[1].stages[0];
  second.insert(second.end(), {reduce, reduce_next});
  plan.collectives = {{CollectiveKind::gradient_reduce, 0, 0, 100},
                      {CollectiveKind::gradient_reduce, 0, 1, 100}};
  class Reduces final : public Costs {
   public:
    std::string source() const override { return "test"; }
    PassTime rest(std::int64_t t, const ContextSplit&, Recompute) const override {
      return {static_cast<double>(t), 2.0 * static_cast<double>(t), 0, 0};
    }
    PassTime head(std::int64_t, const ContextSplit&) const override { return {}; }
    PassTime attention(std::int64_t, std::int64_t, std::int64_t, const ContextSplit&,
                       Recompute) const override {
      return {};
    }
    double exchange(std::int64_t, const ContextSplit&, Link) const override { return 0; }
    double ring_hop(std::int64_t, const ContextSplit&, RingLevel, bool, Link) const override {
      return 0;
    }
    double stage_hop(std::int64_t, const ContextSplit&, Link) const override { return 0; }
    double host_copy(std::int64_t, const ContextSplit&) const override { return 0; }
    double reduce(const Collective&) const override { return 0.5; }
    double gather(const Collective&) const override { return 0; }
    double optimizer(std::int64_t, bool) const override { return 0; }
  };
  const SimulatedStep step = simulate(plan, {.layers = 1}, Reduces());
  EXPECT_DOUBLE_EQ(step.step_s, 6 + 0.5 + 6 + 0.5);
  EXPECT_DOUBLE_EQ(step.lanes[1][0].end_s, step.step_s);
  EXPECT_DOUBLE_EQ(step.terms.reduction_s, 1);
  // Without a micro-batch in the first round it may begin with the reduction of that round.
  plan.micro_batches[2].round = 1;
  std::rotate(second.begin(), second.begin() + 2, second.begin() + 3);
  const SimulatedStep later = simulate(plan, {.layers = 1}, Reduces());
  EXPECT_DOUBLE_EQ(later.lanes[1][0].ops.front().begin_s, 6.5);
  EXPECT_DOUBLE_EQ(later.step_s, step.step_s);
}

// All ranks that hold the same weights share the optimizer's work, those of a ring too.
TEST(Simulate, ReplicasShareTheUpdate) {
  StepPlan plan = plan_of({of_lengths({1}), of_lengths({1})},
                          pipeline_of(ScheduleKind::one_f_one_b, 1), 1, {1, 1, 4});
  plan.zero = 1;
  plan.collectives = {{CollectiveKind::optimizer, 0, -1, 800}};
  RingTimes costs;
  EXPECT_DOUBLE_EQ(simulate(plan, {.layers = 1}, costs).terms.optimizer_s,
                   costs.optimizer(100, false));
  plan.zero = 0;
  EXPECT_DOUBLE_EQ(simulate(plan, {.layers = 1}, costs).terms.optimizer_s,
                   costs.optimizer(800, false));
}

// A lane without a micro-batch leaves all of its ranks idle: stages, rings.
TEST(Simulate, IdleRanksAreThoseOfTheWholeLane) {
  for (const int stages : {1, 2})
    for (const int ring : {1, 4}) {
      const StepPlan plan =
          plan_of({of_lengths({2}), {}, {}}, pipeline_of(ScheduleKind::one_f_one_b, stages), 2,
                  {1, 1, ring});
      EXPECT_EQ(simulate(plan, {.layers = 2}, unit_costs()).idle_ranks, 2 * stages * ring);
    }
}

// Recomputation is useful time of a pipeline's operations: one stage alone has no bubble.
TEST(Simulate, RecomputationIsNoBubble) {
  StepPlan plan = plan_of({of_lengths({3, 5})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 1);
  SimulationOptions options{.layers = 1};
  options.recompute.mode = Recompute::full;
  const SimulatedStep step = simulate(plan, options, unit_costs());
  EXPECT_NEAR(step.step_s, 4 * 8, 1e-9);
  EXPECT_NEAR(step.pipelines.bubble_ratio(), 0, 1e-12);
  EXPECT_NEAR(step.load_balance, 1, 1e-12);
}

TEST(Simulate, MuonAddsItsProductsAndWhatMovesToTheUpdate) {
  StepPlan plan =
      plan_of({of_lengths({6}), of_lengths({6})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 1);
  plan.zero = 1;
  plan.collectives = {{CollectiveKind::optimizer, 0, -1, 100}};
  WorkShape work;
  work.model = model_preset("qwen2.5-0.5b");
  const RateCosts costs(device_rates(DeviceKind::h200), work);
  const SimulatedStep plain = simulate(plan, {.layers = 1}, costs);
  SimulationOptions options{.layers = 1};
  options.muon = {{1e12, 0}};
  const SimulatedStep products = simulate(plan, options, costs);
  EXPECT_NEAR(products.terms.optimizer_s - plain.terms.optimizer_s, costs.products(1e12), 1e-12);
  EXPECT_NEAR(products.step_s - plain.step_s, costs.products(1e12), 1e-12);
  options.muon = {{1e12, 1 << 20}};
  ASSERT_GT(costs.reduce({1 << 20, plan.mesh.replicas(), Link::node, true}), 0);
  EXPECT_NEAR(simulate(plan, options, costs).step_s - products.step_s,
              2 * costs.reduce({1 << 20, plan.mesh.replicas(), Link::node, true}), 1e-12);
}

TEST(Simulate, TuningGivesStragglersFewerBlocks) {
  StatedTimes stated;
  stated.token_s = 1e-6, stated.pair_s = 1e-9;
  const StatedCosts costs(stated);
  StepPlan plan = plan_of({of_lengths({65536}), of_lengths({4096})},
                          pipeline_of(ScheduleKind::one_f_one_b, 2), 8);
  SimulationOptions options{.layers = 8, .base_budget = 32};
  const SimulatedStep fixed = simulate(plan, options, costs);
  options.tune = true;
  options.dst.base_budget = 32;
  options.dst.candidates = default_candidates(32);
  plan.micro_batches[0].tuning = {32, 8, true};
  plan.micro_batches[1].tuning = {32, 128, false};
  const SimulatedStep tuned = simulate(plan, options, costs);
  EXPECT_LT(tuned.step_s, fixed.step_s);
  EXPECT_LT(tuned.imbalance, fixed.imbalance);
  EXPECT_LE(tuned.budgets.largest_coverage_loss, options.dst.threshold + 1e-12);
  EXPECT_EQ(fixed.budgets.mean_budget, 32);
  double choices = 0;
  for (const double n : tuned.budgets.counts) choices += n;
  EXPECT_EQ(choices, 16);  // of two samples in eight layers
}

// Three layers and two with the head, whose backward follows its forward at once (1 + 2): a layer
// takes 5 + 8 forward, twice that backward, 4 of which are weight gradients.
TEST(Simulate, StagesTakeTheTimeOfTheirLayers) {
  for (const ScheduleKind kind : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble}) {
    StepPlan plan = plan_of({of_lengths({1})}, pipeline_of(kind, 2), 5);
    plan.layer_begin = {0, 3};
    const SimulatedStep step = simulate(plan, {.layers = 5}, RingTimes());
    const double forward[] = {39, 29}, backward[] = {78, 52}, weight[] = {12, 8};
    for (std::size_t s = 0; s < 2; ++s)
      for (const TimedOp& timed : step.lanes[0][s].ops) {
        const double seconds = timed.end_s - timed.begin_s;
        const std::map<OpKind, double> expected{{OpKind::forward, forward[s]},
                                                {OpKind::backward, backward[s]},
                                                {OpKind::backward_input, backward[s] - weight[s]},
                                                {OpKind::backward_weight, weight[s]}};
        if (const auto found = expected.find(timed.op.kind); found != expected.end()) {
          EXPECT_DOUBLE_EQ(seconds, found->second);
        }
      }
    EXPECT_DOUBLE_EQ(step.pipelines.useful_s, 39 + 29 + 78 + 52) << kind;
  }
}

// What a layer chooses depends on the layer and not on the stage that holds it.
TEST(Simulate, BudgetsDoNotDependOnTheStages) {
  SimulationOptions options{.layers = 7, .base_budget = 32, .tune = true};
  options.dst.base_budget = 32;
  options.dst.candidates = default_candidates(32);
  const auto budgets = [&](std::vector<std::int64_t> layer_begin) {
    StepPlan plan =
        plan_of({of_lengths({65536, 30000})},
                pipeline_of(ScheduleKind::one_f_one_b, static_cast<int>(layer_begin.size())), 7);
    plan.layer_begin = std::move(layer_begin);
    plan.micro_batches[0].tuning = {32, 8, true};
    plan.micro_batches[1].tuning = {32, 64, false};
    return simulate(plan, options, unit_costs()).budgets;
  };
  const SimulatedBudgets whole = budgets({0});
  EXPECT_GT(whole.largest_coverage_loss, 0);
  for (const SimulatedBudgets& split : {budgets({0, 3}), budgets({0, 1, 5})}) {
    EXPECT_DOUBLE_EQ(split.mean_budget, whole.mean_budget);
    EXPECT_NEAR(split.mean_coverage_loss, whole.mean_coverage_loss, 1e-12);
    EXPECT_EQ(split.sums, whole.sums);
    EXPECT_EQ(split.counts, whole.counts);
  }
}

TEST(Simulate, FetchesRunBesideTheComputationBeforeTheirRecompute) {
  std::vector<MicroBatch> chunks;
  for (std::int64_t c = 0; c < 3; ++c) chunks.push_back({{{0, 4 * c, 4 * c + 4, 0}}});
  PipelineOptions pipeline = pipeline_of(ScheduleKind::state_aware_1f1b, 2);
  const double without =
      simulate(plan_of({chunks}, pipeline, 2), {.layers = 2}, RingTimes()).step_s;
  pipeline.offload = true;
  const SimulatedStep step = simulate(plan_of({chunks}, pipeline, 2), {.layers = 2}, RingTimes());
  EXPECT_GE(step.step_s, without);
  EXPECT_LE(step.step_s, without + 2 * 2);
  int copies = 0;
  for (const TimedOp& op : step.lanes[0][1].ops)
    if (op.op.kind == OpKind::fetch || op.op.kind == OpKind::offload) {
      ++copies;
      EXPECT_DOUBLE_EQ(op.end_s - op.begin_s, 2);
    }
  EXPECT_EQ(copies, 4);  // of the two chunks that run again
}

// Peak bytes are those of the lane that needs most, replayed with its own operations.
TEST(Simulate, PeakBytesAreThoseOfTheLaneThatNeedsMost) {
  const StepPlan plan = plan_of({of_lengths({64}), of_lengths({256, 256, 64}), of_lengths({64})},
                                pipeline_of(ScheduleKind::one_f_one_b, 2), 4);
  StageMemory stage;
  stage.model.layers = 4, stage.model.hidden = 32, stage.model.intermediate = 64;
  stage.model.query_heads = 2, stage.model.kv_heads = 1, stage.model.head_dim = 16;
  stage.model.vocabulary = 128;
  stage.layers = 2, stage.parameters = 1000;
  SimulationOptions options;
  options.layers = 4;
  EXPECT_TRUE(simulate(plan, options, unit_costs()).memory.empty());
  options.memory = {stage, stage};
  options.memory[0].last = false, options.memory[1].first = false;
  const SimulatedStep step = simulate(plan, options, unit_costs());
  ASSERT_EQ(step.memory.size(), 2u);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto lane = [&](int d) {
      return replay_memory(options.memory[s], lane_work(plan, d)[s]);
    };
    EXPECT_EQ(step.memory[s].bytes, lane(1).bytes);
    EXPECT_GT(step.memory[s].total(), lane(0).total());
  }
  // A run's lanes go through its steps each with its own pools.
  const StepPlan turned = plan_of({of_lengths({256, 256, 64}), of_lengths({64}), of_lengths({64})},
                                  pipeline_of(ScheduleKind::one_f_one_b, 2), 4);
  const std::vector<MemoryEstimate> run = run_memory({plan, turned}, options);
  ASSERT_EQ(run.size(), 2u);
  for (std::size_t s = 0; s < 2; ++s) {
    const auto lane = [&](int d) {
      return replay_run(options.memory[s], {lane_work(plan, d)[s], lane_work(turned, d)[s]});
    };
    EXPECT_EQ(run[s].total(), std::max(lane(0).total(), lane(1).total()));
    EXPECT_GE(run[s].total(), run_memory({plan}, options)[s].total());
  }
  EXPECT_TRUE(run_memory({}, options).empty());
  // The first stage keeps two micro-batches, the last one.
  EXPECT_GT(step.memory[0][MemoryCategory::activations],
            step.memory[1][MemoryCategory::activations]);
  options.memory.pop_back();
  EXPECT_THROW(simulate(plan, options, unit_costs()), Error);
  EXPECT_THROW(run_memory({plan}, options), Error);
}

// The rank with most of Muon's work need not be the one with most activations.
TEST(Simulate, RanksThatShareMuonAreReplayedWithTheirOwnShares) {
  StageMemory stage;
  stage.model.layers = stage.layers = 2, stage.model.hidden = 32, stage.model.intermediate = 64;
  stage.model.query_heads = 2, stage.model.kv_heads = 1, stage.model.head_dim = 16;
  stage.model.vocabulary = 128;
  stage.parameters = 40000, stage.zero = 1;
  const MuonShare heavy{1000, 4 << 20, 20000}, light{8000, 1 << 20, 0};
  for (const ContextSplit split :
       {ContextSplit{}, {.sp = 2}, {.ring_inner = 2}, {.sp = 2, .ring_inner = 2}}) {
    const StepPlan plan = plan_of({of_lengths({67, 67}), of_lengths({259, 259})},
                                  pipeline_of(ScheduleKind::one_f_one_b, 1), 2, split);
    const auto ranks = static_cast<std::size_t>(2 * split.sp * split.ring());
    SimulationOptions options;
    options.layers = 2;
    options.memory = {stage};
    options.memory[0].replicas = static_cast<int>(ranks);
    std::set<std::int64_t> totals;
    for (std::size_t most = 0; most < ranks; ++most) {
      std::vector<MuonShare>& shares = options.memory[0].muon;
      shares.assign(ranks, light);
      shares[most] = heavy;
      std::int64_t wanted = 0;
      for (std::size_t r = 0; r < ranks; ++r) {  // sp fastest, then the ring, then the lanes
        StageMemory one = options.memory[0];
        one.muon = {shares[r]};
        const auto sp = static_cast<std::size_t>(split.sp);
        const auto ring_rank = static_cast<int>(r / sp) % split.ring(),
                   d = static_cast<int>(r / sp) / split.ring();
        wanted =
            std::max(wanted, replay_ranks(one, {lane_work(plan, d, {}, ring_rank)[0]}).total());
      }
      EXPECT_EQ(run_memory({plan}, options)[0].total(), wanted) << most;
      // Over many steps every rank meets the fullest micro-batches.
      EXPECT_GE(step_memory(plan, options)[0].total(), wanted) << most;
      totals.insert(wanted);
    }
    EXPECT_EQ(totals.size(), static_cast<std::size_t>(2 * split.ring())) << "it matters who";
  }
}

TEST(SimulateSlow, AStepOf16384RanksIsSimulatedInSeconds) {
  std::mt19937_64 random(7);
  PipelineOptions pipeline = pipeline_of(ScheduleKind::one_f_one_b, 8);
  std::vector<std::vector<MicroBatch>> lists;
  for (int d = 0; d < 2048; ++d) {
    std::vector<MicroBatch>& list = lists.emplace_back();
    for (int m = 0; m < 8; ++m)
      list.push_back(packed({64 + static_cast<std::int64_t>(random() % 8000),
                             64 + static_cast<std::int64_t>(random() % 8000)}));
  }
  const StepPlan plan = plan_of(lists, pipeline, 32);
  WorkShape work;
  work.model = model_preset("llama3.1-8b");
  const RateCosts costs(device_rates(DeviceKind::h100), work);
  const auto begin = std::chrono::steady_clock::now();
  const SimulatedStep step = simulate(plan, {.layers = 32}, costs);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("simulated %d ranks, %zu micro-batches in %.3f s: step %.3f s, bubble %.3f\n",
              plan.mesh.size(), plan.micro_batches.size(), seconds, step.step_s,
              step.pipelines.bubble_ratio());
  EXPECT_EQ(plan.mesh.size(), 16384);
  EXPECT_GT(step.pipelines.bubble_ratio(), 0.3);
  EXPECT_LT(seconds, 3);
}

}  // namespace
}  // namespace ballast
