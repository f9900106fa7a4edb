// plan_step: a step's plan against its batch, for every method, and at the size of a large machine.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <set>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/plan_step.hpp"
#include "core/plan/step_problems.hpp"
#include "tests/core/plan/batch/long_tailed_lengths.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

StepOptions options_of(int dp, int pp, Batching method = Batching::packed) {
  StepOptions options;
  options.mesh.dp = dp;
  options.mesh.pp = pp;
  options.batching.dp = dp;
  options.batching.method = method;
  options.batching.micro_batch_tokens = 4096;
  options.batching.pair_cost_tokens = 1e-4;
  options.batching.sample_cost = [](std::int64_t tokens) { return static_cast<double>(tokens); };
  options.pipeline.costs.pair_s = 1e-4;
  options.layout.rule = {LayoutKind::zigzag, 64, 1};
  options.layer_begin.clear();
  options.stage_elements.clear();
  for (int s = 0; s < pp; ++s) {
    options.layer_begin.push_back(s);
    options.stage_elements.push_back(100 + s);
  }
  if (method == Batching::balanced) {
    options.batching.splits = {{1, 1, 1}, {2, 2, 1}};
    if (dp % 4 == 0) options.batching.splits.push_back({4, 4, 1});
    TestCosts costs;
    costs.prefix_bytes = 0;  // as in runs: a chunk's tokens alone count
    options.batching.placement_costs = std::make_shared<TestCosts>(costs);
    options.batching.stages = pp;
  }
  if (method == Batching::hbp)
    options.batching.groups = {{4096, 1, -1}, {16384, 2, 1}, {65536, 4, 2}};
  return options;
}

std::vector<SampleLength> samples_of(int count, std::int64_t longest, std::uint64_t seed = 0) {
  std::vector<SampleLength> list;
  for (int i = 0; i < count; ++i) {
    const double u = random_uniform(seed, stream_of("plan_step"), static_cast<std::uint64_t>(i));
    const auto tokens = static_cast<std::int64_t>(1 + u * u * u * static_cast<double>(longest));
    list.push_back({i, tokens, tokens - 1});
  }
  return list;
}

const std::vector<Batching> kMethods = values_of<Batching>();
constexpr std::array kDrawnSchedules{ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                                     ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble};

TEST(PlanStep, EveryMethodGivesASoundPlanOfAllSamples) {
  for (const Batching method : kMethods)
    for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble})
      for (const int zero : {1, 2}) {
        StepOptions options = options_of(4, 2, method);
        options.pipeline.schedule = schedule;
        options.pipeline.search = 2;
        options.zero = zero;
        const auto samples = samples_of(24, method == Batching::hbp ? 65536 : 16384);
        const StepPlan plan = plan_step(3, samples, options);
        EXPECT_EQ(problems(plan), "") << method << " " << schedule << " ZeRO " << zero;
        std::int64_t tokens = 0, loss_tokens = 0;
        for (const SampleLength& s : samples) tokens += s.tokens, loss_tokens += s.loss_tokens;
        EXPECT_EQ(plan.tokens(), tokens);
        EXPECT_EQ(plan.loss_tokens, loss_tokens);
        EXPECT_EQ(plan.samples(), 24);
        EXPECT_EQ(plan.hash(), plan_step(3, samples, options).hash());
        EXPECT_NE(plan.hash(), plan_step(4, samples, options).hash());
      }
}

TEST(PlanStepSlow, RandomPlansReplayWithoutDeadlock) {
  std::uint64_t draw = 0;
  const auto random = [&](int below) {
    return static_cast<int>(random_bits(17, stream_of("placements"), draw++) %
                            static_cast<std::uint64_t>(below));
  };
  std::set<int> degrees;
  std::set<LayoutKind> layouts;
  bool chunked = false;
  const int trials = std::getenv("BALLAST_TEST_FULL") != nullptr ? 10000 : 1000;
  for (int trial = 0; trial < trials && !HasFailure(); ++trial) {
    const int dp = std::array{1, 2, 3, 4, 6, 8}[static_cast<std::size_t>(random(6))];
    const int pp = 1 << random(3);
    const Batching method = trial % 8 != 0 ? Batching::balanced
                            : dp % 4 == 0  ? Batching::hbp
                                           : Batching::chunkflow;
    StepOptions options = options_of(dp, pp, method);
    options.batching.splits.clear();
    for (int ranks = 1; ranks <= dp; ++ranks)
      if (dp % ranks == 0) options.batching.splits.push_back({ranks, ranks, 1});
    options.mesh.cp_inner = 1 + random(4);
    options.query_heads = std::array{0, 4, 14}[static_cast<std::size_t>(trial % 3)];
    options.layout.rule.kind = LayoutKind::automatic;
    options.batching.micro_batch_tokens = 512 << random(4);
    options.batching.chunk_k = 1 + random(3);
    options.batching.align = random(2) == 0 ? 1 : 64;
    options.zero = random(3);
    options.pipeline.schedule = kDrawnSchedules[static_cast<std::size_t>(random(4))];
    options.pipeline.search = 1 + random(3);
    options.pipeline.k = options.batching.chunk_k;
    options.layout.rule.align = options.batching.align;
    const auto samples = samples_of(1 + random(40), 1 << (8 + random(8)), draw);
    const StepPlan plan = plan_step(trial, samples, options);
    EXPECT_EQ(problems(plan), "") << "trial " << trial << " dp " << dp << " pp " << pp << " "
                                  << method << " " << options.pipeline.schedule << " K "
                                  << options.pipeline.k << " ZeRO " << options.zero;
    for (const LayoutRule& rule : plan.layouts) layouts.insert(rule.kind);
    EXPECT_EQ(plan.samples(), static_cast<std::int64_t>(samples.size()));
    for (const PlannedMicroBatch& m : plan.micro_batches) {
      degrees.insert(m.group.ranks), chunked = chunked || m.chunk > 0;
      EXPECT_EQ(m.split, joined_split(options.mesh, m.group.ranks, options.query_heads));
    }
  }
  EXPECT_EQ(degrees, (std::set<int>{1, 2, 3, 4, 6, 8}));
  EXPECT_EQ(layouts,
            (std::set{LayoutKind::contiguous, LayoutKind::striped, LayoutKind::document_zigzag}));
  EXPECT_TRUE(chunked);
}

/// Long samples in chunks beside short ones on four stages: forwards of chunks that keep nothing
/// run ahead as far as transfers may, and lists that know nothing of one another met in a circle.
TEST(PlanStepSlow, ChunksThatRunAheadMeetInOneOrder) {
  StepOptions options = options_of(3, 4, Batching::chunkflow);
  options.pipeline.schedule = ScheduleKind::state_aware_1f1b;
  options.pipeline.search = 1;
  options.zero = 2;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    options.batching.micro_batch_tokens = 512;
    options.pipeline.k = 1 + static_cast<int>(seed % 3);
    const auto samples = samples_of(10 + static_cast<int>(seed % 30), 32768, seed);
    EXPECT_EQ(problems(plan_step(0, samples, options)), "") << "seed " << seed;
  }
}

TEST(PlanStep, RandomPlansOfEveryMethodAndScheduleReplay) {
  std::uint64_t draw = 0;
  const auto random = [&](int below) {
    return static_cast<int>(random_bits(test_seed(), stream_of("methods"), draw++) %
                            static_cast<std::uint64_t>(below));
  };
  const int trials = std::getenv("BALLAST_TEST_FULL") != nullptr ? 5000 : 500;
  for (int trial = 0; trial < trials && !HasFailure(); ++trial) {
    const Batching method = kMethods[static_cast<std::size_t>(random(int(kMethods.size())))];
    const int dp = std::array{1, 2, 3, 4, 6, 8}[static_cast<std::size_t>(random(6))];
    StepOptions options = options_of(dp, 1 + random(4), method);
    if (method == Batching::hbp)
      std::erase_if(options.batching.groups,
                    [dp](const PackGroup& g) { return dp % g.ranks != 0; });
    std::erase_if(options.batching.splits,
                  [dp](const PlacementSplit& split) { return dp % split.ranks != 0; });
    options.pipeline.schedule = kDrawnSchedules[static_cast<std::size_t>(random(4))];
    options.pipeline.search = random(3);
    options.batching.chunk_k = 1 + random(3);
    options.batching.align = random(2) == 0 ? 1 : 64;
    options.layout.rule.align = options.batching.align;
    options.zero = random(3);
    const std::int64_t longest = std::min<std::int64_t>(
        1 << random(14), method == Batching::hbp ? options.batching.groups.back().tokens : 1 << 14);
    auto samples = samples_of(1 + random(30), longest, draw);
    if (random(4) == 0)  // all alike
      for (SampleLength& s : samples) s.tokens = longest, s.loss_tokens = longest - 1;
    if (random(4) == 0) samples.front() = {samples.front().sample, 0, 0};
    const StepPlan plan = plan_step(trial, samples, options);
    EXPECT_EQ(problems(plan), "") << "trial " << trial << " " << method << " dp " << dp << " pp "
                                  << options.mesh.pp << " " << options.pipeline.schedule;
    EXPECT_EQ(plan.samples(), static_cast<std::int64_t>(samples.size()));
  }
}

TEST(PlanStep, APlacementKeepsItsSplits) {
  StepOptions options = options_of(8, 2);
  options.layout.rule.kind = LayoutKind::automatic;
  Placement placed;
  placed.ranks.resize(8);
  placed.micro_batches = {{{{1, 0, 4096, 4095}}, 0, {4, 1, 4}},
                          {{{2, 0, 2048, 2047}, {3, 0, 100, 99}}, 4, {2, 2, 1}},
                          {{{1, 0, 4096, 4095}}, 6, {2, 1, 2}},  // a sample that comes twice
                          {{{4, 0, 64, 63}}, 3, {1, 1, 1}}};
  const StepPlan plan = plan_placement_step(7, placed, {}, options);
  EXPECT_EQ(problems(plan), "");
  EXPECT_EQ(plan.step, 7);
  ASSERT_EQ(plan.micro_batches.size(), placed.micro_batches.size());
  std::set<int> seen;
  for (const PlacedMicroBatch& m : placed.micro_batches)
    for (const PlannedMicroBatch& p : plan.micro_batches)
      if (p.group == RankGroup{m.first, m.split.ranks}) {
        seen.insert(m.first);
        EXPECT_EQ(p.segments, m.segments);
        EXPECT_EQ(p.split, (ContextSplit{m.split.sp, 1, m.split.ring}));
        EXPECT_EQ(plan.layout(p).ranks(), m.split.ring);
      }
  EXPECT_EQ(seen.size(), placed.micro_batches.size());
  options.mesh.sp = 2;
  EXPECT_THROW(plan_placement_step(7, placed, {}, options), Error);
}

TEST(PlanStep, APairOfAPlacementThatIsGivenIsTwoDocuments) {
  StepOptions options = options_of(2, 1);
  options.batching.align = 64;
  Placement placed;
  placed.ranks.resize(2);
  placed.micro_batches = {{{{3, 0, 100, 90}}, 0, {1, 1, 1}}, {{{4, 0, 80, 79}}, 1, {1, 1, 1}}};
  const StepPlan plan =
      plan_placement_step(0, placed, {{3, 100, 90, 60, 55}, {4, 80, 79, 30, 29}}, options);
  ASSERT_EQ(plan.micro_batches.size(), 2u);
  EXPECT_EQ(plan.micro_batches[0].segments,
            (std::vector<Segment>{{3, 0, 60, 55, 0}, {3, 0, 40, 35, 60}}));
  EXPECT_EQ(plan.micro_batches[1].segments,
            (std::vector<Segment>{{4, 0, 30, 29, 0}, {4, 0, 50, 50, 30}}));
  for (const PlannedMicroBatch& m : plan.micro_batches) EXPECT_EQ(m.align, 64);
}

TEST(PlanStep, IdlePlacesOfRoundsDisappear) {
  StepOptions options = options_of(4, 1, Batching::hbp);
  const StepPlan plan = plan_step(0, {{0, 65536, 1}, {1, 16384, 1}, {2, 4096, 1}}, options);
  EXPECT_EQ(problems(plan), "");
  ASSERT_EQ(plan.micro_batches.size(), 3u);
  std::vector<int> ranks;
  for (const PlannedMicroBatch& m : plan.micro_batches) ranks.push_back(m.group.ranks);
  std::sort(ranks.begin(), ranks.end());
  EXPECT_EQ(ranks, (std::vector<int>{1, 2, 4}));
  for (const PlannedMicroBatch& m : plan.micro_batches) {
    EXPECT_EQ(m.split.sp, m.group.ranks);
    EXPECT_EQ(m.recompute_layers, m.group.ranks == 4 ? 2 : m.group.ranks == 2 ? 1 : -1);
  }
}

TEST(PlanStep, ChunksLossWeightsTargetsAndCollectives) {
  StepOptions options = options_of(1, 2, Batching::chunkflow);
  options.normaliser = LossNormaliser::sum;
  options.zero = 1;
  options.tied_elements = 7;
  options.tuning = [](const StepPlan& plan) {
    std::vector<TuningTarget> targets;
    for (const PlannedMicroBatch& m : plan.micro_batches)
      targets.push_back({32, m.segments[0].end, false});
    return targets;
  };
  const StepPlan plan = plan_step(0, {{0, 10000, 9999}}, options);
  ASSERT_EQ(plan.micro_batches.size(), 3u);
  for (int m = 0; m < 3; ++m) {
    EXPECT_EQ(plan.micro_batches[static_cast<std::size_t>(m)].chunk, m);
    EXPECT_EQ(plan.micro_batches[static_cast<std::size_t>(m)].loss_weight, 1);
  }
  EXPECT_EQ(plan.micro_batches[2].tuning, (TuningTarget{32, 10000, false}));
  std::vector<CollectiveKind> kinds;
  for (const PlannedCollective& c : plan.collectives) kinds.push_back(c.kind);
  using Kind = CollectiveKind;
  EXPECT_EQ(kinds, (std::vector<Kind>{Kind::gradient_reduce, Kind::gradient_reduce, Kind::tied_sum,
                                      Kind::gradient_norm, Kind::optimizer, Kind::optimizer,
                                      Kind::parameter_gather, Kind::parameter_gather}));
  EXPECT_EQ(plan.collectives[1], (PlannedCollective{Kind::gradient_reduce, 1, -1, 101}));
  options.zero = 2;
  const StepPlan reduced = plan_step(0, {{0, 10000, 9999}}, options);
  EXPECT_EQ(reduced.rounds(), 3);
  EXPECT_EQ(reduced.collectives[5], (PlannedCollective{Kind::gradient_reduce, 1, 2, 101}));
}

TEST(PlanStep, ExactLossTokensWhereTheNormaliserNeedsThem) {
  StepOptions options = options_of(1, 1, Batching::chunkflow);
  options.count_loss_tokens = [](Batch& batch) {
    for (auto& list : batch.micro_batches)
      for (MicroBatch& m : list) m.segments[0].loss_tokens = m.segments[0].begin == 0 ? 8 : 2;
  };
  const std::vector<SampleLength> samples{{0, 8000, 1000}};
  EXPECT_EQ(plan_step(0, samples, options).loss_tokens, 1000);
  options.normaliser = LossNormaliser::token_mean;
  const StepPlan plan = plan_step(0, samples, options);
  EXPECT_EQ(plan.loss_tokens, 10);
  EXPECT_DOUBLE_EQ(plan.micro_batches[0].loss_weight, 1.0 / 10);  // both chunks are one sample
  EXPECT_DOUBLE_EQ(plan.micro_batches[1].loss_weight, 1.0 / 10);
}

// A step that goes on in the next epoch may take a sample twice, each time in chunks.
TEST(PlanStep, ASampleMayComeTwice) {
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble}) {
    StepOptions options = options_of(2, 2, Batching::chunkflow);
    options.pipeline.schedule = schedule;
    const StepPlan plan = plan_step(0, {{5, 10000, 9999}, {5, 10000, 9999}}, options);
    EXPECT_EQ(problems(plan), "") << name(schedule);
    EXPECT_EQ(plan.micro_batches.size(), 6u);
  }
}

TEST(PlanStep, EvaluationRunsForwardAlone) {
  for (const Batching method : kMethods) {
    const StepPlan plan = plan_evaluation(samples_of(24, 16384), options_of(4, 2, method));
    EXPECT_EQ(problems(plan), "") << method;
    EXPECT_EQ(plan.step, -1);
    EXPECT_TRUE(plan.collectives.empty());
  }
}

TEST(PlanStep, CostsOfAnotherSourceBuildStateAwareSchedules) {
  StepOptions options = options_of(2, 4, Batching::chunkflow);
  options.pipeline.schedule = ScheduleKind::state_aware_1f1b;
  const auto samples = samples_of(12, 16384);
  const StepPlan stated = plan_step(0, samples, options);
  options.costs = [](const StepPlan&) {
    return ScheduleCosts{[](int, const Op& op) {
      return op.kind == OpKind::send ? 0.0 : 1.0 + op.micro_batch * op.micro_batch % 7;
    }};
  };
  const StepPlan other = plan_step(0, samples, options);
  EXPECT_EQ(problems(other), "");
  EXPECT_NE(stated.hash(), other.hash());
}

// 16,384 ranks: dp 2048 x pp 8, eight micro-batches a rank.
TEST(PlanStepSlow, PlansALargeMachineInTime) {
  for (const ScheduleKind schedule : {ScheduleKind::one_f_one_b, ScheduleKind::state_aware_1f1b}) {
    StepOptions options = options_of(2048, 8);
    options.pipeline.schedule = schedule;
    const auto samples = samples_of(16384 * 4, 4096);
    const auto begin = std::chrono::steady_clock::now();
    const StepPlan plan = plan_step(0, samples, options);
    const auto planned = std::chrono::steady_clock::now();
    EXPECT_EQ(problems(plan), "");
    const auto checked = std::chrono::steady_clock::now();
    const auto hash = plan.hash();
    const auto seconds = [](auto a, auto b) {
      return std::chrono::duration<double>(b - a).count();
    };
    EXPECT_LT(seconds(begin, checked), 5);  // a third of a second on an idle core
    std::printf(
        "%s: %zu micro-batches, %zu schedules, hash %016llx: planned in %.3f s, checked in "
        "%.3f s\n",
        name(schedule), plan.micro_batches.size(), plan.schedules.size(),
        static_cast<unsigned long long>(hash), seconds(begin, planned), seconds(planned, checked));
  }
}

}  // namespace
}  // namespace ballast
