// Pipeline schedules: figures of ChunkFlow Sections 3 and 4.3, bounds on live activations, and
// random mixes of lengths.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "core/base/error.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/pipeline/state_aware_schedule.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

/// Durations proportional to length, backward twice forward, its halves alike.
ScheduleCosts proportional(std::vector<double> length, double hop = 0) {
  return {[length, hop](int, const Op& op) {
    const double n = length[op.micro_batch];
    if (op.kind == OpKind::forward || op.kind == OpKind::recompute ||
        op.kind == OpKind::backward_input || op.kind == OpKind::backward_weight)
      return n;
    if (op.kind == OpKind::backward) return 2 * n;
    return hop * n;
  }};
}

/// Walks all stages with at most `buffers` messages under way per pair and payload, each taken in
/// the order of sending, as transports do.
bool runs_with_buffers(const Schedule& schedule, std::size_t buffers) {
  std::map<std::tuple<int, int, Payload>, std::vector<int>> wires;
  std::vector<std::size_t> next(schedule.stages.size(), 0);
  for (bool progress = true; progress;) {
    progress = false;
    for (int s = 0; s < static_cast<int>(schedule.stages.size()); ++s)
      for (; next[s] < schedule.stages[s].size(); ++next[s], progress = true) {
        const Op& op = schedule.stages[s][next[s]];
        if (op.kind == OpKind::send) {
          auto& wire = wires[{s, op.peer, op.payload}];
          if (wire.size() == buffers) break;
          wire.push_back(op.micro_batch);
        } else if (op.kind == OpKind::recv) {
          auto& wire = wires[{op.peer, s, op.payload}];
          if (wire.empty()) break;
          if (wire.front() != op.micro_batch) return false;
          wire.erase(wire.begin());
        }
      }
  }
  for (std::size_t s = 0; s < next.size(); ++s)
    if (next[s] < schedule.stages[s].size()) return false;
  return true;
}

TEST(PipelineSchedule, FiguresOfChunkFlow) {
  const auto bubble = [](const Schedule& schedule, const ScheduleCosts& costs) {
    EXPECT_EQ(problems(schedule), "");
    return simulate(schedule, costs).bubble_ratio;
  };
  const ChunkGroups four{{0}, {1}, {2}, {3}}, chunks{{0, 1}, {2}, {3}};
  const ScheduleCosts equal = proportional({1, 1, 1, 1}), mixed = proportional({4, 2, 1, 1}),
                      twos = proportional({2, 2, 2, 2});
  EXPECT_NEAR(bubble(one_f_one_b_schedule(four, 4), equal), 3.0 / 7, 1e-12);
  EXPECT_NEAR(bubble(one_f_one_b_schedule(four, 4), mixed), 4.0 / 7, 1e-12);
  EXPECT_NEAR(bubble(one_f_one_b_schedule({{0}, {1}}, 4), proportional({4, 4})), 0.6, 1e-12);
  EXPECT_NEAR(bubble(gpipe_schedule(four, 4), equal), 3.0 / 7, 1e-12);
  for (int search : {1, 64}) {
    EXPECT_NEAR(bubble(state_aware_schedule(chunks, 4, 1, twos, search), twos), 1 - 24.0 / 44,
                1e-12);
    EXPECT_NEAR(bubble(state_aware_schedule(chunks, 4, 2, twos, search), twos), 1 - 24.0 / 42,
                1e-12);
  }
}

TEST(PipelineSchedule, ZeroBubbleFillsWaitsWithWeightGradients) {
  const auto built = [&](const ChunkGroups& groups, int stages, int k,
                         const std::vector<double>& length) {
    const ScheduleCosts costs = proportional(length);
    const Schedule schedule = state_aware_schedule(groups, stages, k, costs, 64, true);
    EXPECT_EQ(problems(schedule), "");
    return simulate(schedule, costs);
  };
  // ZB-H1 (Qi et al. 2024, Section 2.2): m equal micro-batches take m (F + B + W) + (P - 1)(F + B -
  // W); 1F1B (m + P - 1)(F + B + W).
  for (int stages : {2, 3, 4, 6}) {
    const auto seconds = [&](int m) {
      ChunkGroups groups;
      for (int i = 0; i < m; ++i) groups.push_back({i});
      return built(groups, stages, 1, std::vector<double>(m, 1.0)).step_time_s;
    };
    EXPECT_NEAR(seconds(stages), 3 * stages + stages - 1, 1e-12) << stages << " stages";
    EXPECT_LE(seconds(2 * stages), 6 * stages + stages - 1 + stages - 2) << stages << " stages";
  }
  // The mix of ChunkFlow Figure 6, 24 units of work: 44 and 42 with whole backwards.
  const ChunkGroups chunks{{0, 1}, {2}, {3}};
  EXPECT_LE(built(chunks, 4, 1, {2, 2, 2, 2}).step_time_s, 36);
  EXPECT_LE(built(chunks, 4, 2, {2, 2, 2, 2}).step_time_s, 32);
  const Schedule alone = state_aware_schedule(chunks, 1, 1, proportional({2, 2, 2, 2}), 64, true);
  for (const Op& op : alone.stages[0]) EXPECT_NE(op.kind, OpKind::backward_input);
}

/// The order that the plan promises: forward ascending, backward descending, the first N - k chunks
/// recomputed exactly once, weight halves in the order of their input halves.
void expect_state_aware(const Schedule& schedule, const ChunkGroups& groups, int k) {
  for (const auto& ops : schedule.stages) {
    std::vector<std::vector<int>> at(3, std::vector<int>(1000, -1));
    int order = 0;
    std::vector<int> inputs, weights;
    for (const Op& op : ops) {
      if (op.kind == OpKind::backward_weight) weights.push_back(op.micro_batch);
      if (op.kind == OpKind::backward_input) inputs.push_back(op.micro_batch);
      if (op.kind != OpKind::forward && op.kind != OpKind::recompute &&
          op.kind != OpKind::backward && op.kind != OpKind::backward_input)
        continue;
      int& place = at[op.kind == OpKind::forward     ? 0
                      : op.kind == OpKind::recompute ? 1
                                                     : 2][op.micro_batch];
      EXPECT_EQ(place, -1);
      place = order++;
    }
    EXPECT_EQ(inputs, weights);
    for (const auto& group : groups)
      for (std::size_t c = 0; c < group.size(); ++c) {
        const int m = group[c];
        ASSERT_GE(at[0][m], 0);
        ASSERT_GE(at[2][m], 0);
        const bool again = static_cast<int>(c) < static_cast<int>(group.size()) - k;
        EXPECT_EQ(at[1][m] >= 0, again);
        EXPECT_TRUE(!again || (at[0][m] < at[1][m] && at[1][m] < at[2][m]));
        EXPECT_TRUE(c == 0 || (at[0][group[c - 1]] < at[0][m] && at[2][group[c - 1]] > at[2][m]));
      }
  }
}

// 8 tokens that attend to 36 pairs: forward 1 + 8 * 2 + 36 * 0.5 = 35 s, backward twice that, of
// which a share of what tokens cost can wait.
TEST(PipelineSchedule, StatedCostsOfTheHalvesAddUpToABackward) {
  PipelineCosts stated;
  stated.micro_batch_s = 1;
  stated.token_s = 2;
  stated.pair_s = 0.5;
  stated.backward_over_forward = 2;
  stated.weight_share = 0.25;
  stated.hop_token_s = 0.125;
  const std::vector<MicroBatch> list{{{{0, 0, 8, 0}}}};
  ASSERT_EQ(list[0].attention_pairs(), 36);
  const ScheduleCosts costs = schedule_costs(stated, list);
  const auto seconds = [&](OpKind kind) { return costs.duration(0, {kind, 0}); };
  EXPECT_DOUBLE_EQ(seconds(OpKind::forward), 35);
  EXPECT_DOUBLE_EQ(seconds(OpKind::recompute), 35);
  EXPECT_DOUBLE_EQ(seconds(OpKind::backward), 70);
  EXPECT_DOUBLE_EQ(seconds(OpKind::backward_input), 62);
  EXPECT_DOUBLE_EQ(seconds(OpKind::backward_weight), 8);
  EXPECT_DOUBLE_EQ(seconds(OpKind::send), 1);
  EXPECT_DOUBLE_EQ(seconds(OpKind::recv), 0);
  // So one stage takes as long whether backward is cut in two or not.
  for (const ScheduleKind kind : {ScheduleKind::one_f_one_b, ScheduleKind::zero_bubble}) {
    PipelineOptions options;
    options.schedule = kind;
    options.stages = 1;
    options.costs = stated;
    EXPECT_DOUBLE_EQ(simulate(plan_schedule(list, options), costs).step_time_s, 105) << name(kind);
  }
}

TEST(PipelineSchedule, LongSamplesNeverRunFurtherAheadThanATransportAllows) {
  ChunkGroups groups(4);
  std::vector<double> length;
  for (auto& group : groups)
    for (int c = 0; c < 40; ++c) {
      group.push_back(static_cast<int>(length.size()));
      length.push_back(1);
    }
  for (int stages : {2, 3, 4})
    for (const bool split : {false, true})
      for (const int k : {1, 4}) {
        SCOPED_TRACE(fmt::format("{} stages, k {}, split {}", stages, k, split));
        const Schedule schedule =
            state_aware_schedule(groups, stages, k, proportional(length, 0.3), 2, split);
        EXPECT_EQ(problems(schedule), "");
        EXPECT_TRUE(runs_with_buffers(schedule, kTransfersAhead));
        expect_state_aware(schedule, groups, k);
      }
}

void random_mixes(int trials) {
  const unsigned seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < trials && !::testing::Test::HasFailure(); ++trial) {
    const int stages = 1 + below(6), k = 1 + below(4), samples = 1 + below(7);
    ChunkGroups groups;
    std::vector<double> length;
    std::size_t longest = 1;
    for (int g = 0; g < samples; ++g) {
      const int chunks = below(3) == 0 ? 1 + below(9) : 1;
      longest = std::max(longest, static_cast<std::size_t>(chunks));
      groups.emplace_back();
      for (int c = 0; c < chunks; ++c) {
        groups.back().push_back(static_cast<int>(length.size()));
        length.push_back(1 + below(16));
      }
    }
    const ScheduleCosts costs = proportional(length, below(2) == 0 ? 0.0 : 0.3);
    double work = 0;
    for (double n : length) work += 3 * n;
    const auto check = [&](const char* what, const Schedule& schedule, int keep) {
      SCOPED_TRACE(fmt::format("{} trial {}: {} stages, k {}", what, trial, stages, k));
      EXPECT_EQ(problems(schedule), "");
      EXPECT_TRUE(runs_with_buffers(schedule, kTransfersAhead));
      const SimulatedSchedule result = simulate(schedule, costs);
      EXPECT_GE(result.step_time_s, work - 1e-9);
      EXPECT_NEAR(result.bubble_ratio, 1 - work / result.step_time_s, 1e-9);
      expect_state_aware(schedule, groups, keep);
      return result;
    };
    const int all = static_cast<int>(longest);
    check("gpipe", gpipe_schedule(groups, stages), all);
    const SimulatedSchedule plain = check("1f1b", one_f_one_b_schedule(groups, stages), all);
    const Schedule schedule = state_aware_schedule(groups, stages, k, costs, 4);
    const SimulatedSchedule aware = check("state-aware", schedule, k);
    EXPECT_EQ(schedule.hash(), state_aware_schedule(groups, stages, k, costs, 4).hash());
    const SimulatedSchedule halves =
        check("zero-bubble", state_aware_schedule(groups, stages, k, costs, 4, true), k);
    for (int s = 0; s < stages; ++s) {
      EXPECT_LE(halves.peak_live_activations[s], k + stages - 1);
      EXPECT_LE(plain.peak_live_activations[s], all + stages - 1 - s);
      EXPECT_LE(aware.peak_live_activations[s], k + stages - 1 - s);
    }
  }
}

TEST(PipelineSchedule, RandomMixesNeverDeadlockAndKeepTheBounds) { random_mixes(60); }

TEST(PipelineScheduleSlow, RandomMixesNeverDeadlockAndKeepTheBounds) { random_mixes(1000); }

// What a profile table is for: a last stage that is half as dear again (its head), and time that
// grows faster than tokens.
TEST(PipelineScheduleSlow, TimesThatAreTrueGiveShorterSteps) {
  const unsigned seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  double stated_s = 0, measured_s = 0;
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<MicroBatch> list;
    const int samples = 2 + static_cast<int>(random() % 7);
    for (int s = 0; s < samples; ++s) {
      const std::int64_t tokens = random() % 3 == 0 ? 9 + static_cast<std::int64_t>(random() % 24)
                                                    : 1 + static_cast<std::int64_t>(random() % 8);
      for (std::int64_t begin = 0; begin < tokens; begin += 8)
        list.push_back({{{s, begin, std::min(tokens, begin + 8), 0}}});
    }
    const ScheduleCosts real{[&](int stage, const Op& op) {
      const MicroBatch& m = list[static_cast<std::size_t>(op.micro_batch)];
      const double forward =
          (static_cast<double>(m.tokens()) + 0.05 * m.attention_pairs()) * (stage == 3 ? 1.5 : 1.0);
      const double weight = 0.7 * static_cast<double>(m.tokens());
      switch (op.kind) {
        case OpKind::forward:
        case OpKind::recompute:
          return forward;
        case OpKind::backward:
          return 2 * forward;
        case OpKind::backward_input:
          return 2 * forward - weight;
        case OpKind::backward_weight:
          return weight;
        default:
          return 0.0;
      }
    }};
    PipelineOptions options;
    options.schedule =
        random() % 2 == 0 ? ScheduleKind::zero_bubble : ScheduleKind::state_aware_1f1b;
    options.stages = 4;
    options.k = 1 + static_cast<int>(random() % 3);
    const Schedule measured = plan_schedule(list, options, real);
    EXPECT_EQ(problems(measured), "");
    stated_s += simulate(plan_schedule(list, options), real).step_time_s;
    measured_s += simulate(measured, real).step_time_s;
  }
  EXPECT_LT(measured_s, 0.99 * stated_s);
}

TEST(PipelineSchedule, InputsLeaveAfterTheFirstForwardAndComeOneOpBeforeTheSecond) {
  const std::vector<MicroBatch> list{
      {{{0, 0, 4, 0}}}, {{{0, 4, 8, 0}}}, {{{0, 8, 9, 0}}}, {{{1, 0, 3, 0}}}};
  PipelineOptions options;
  options.schedule = ScheduleKind::state_aware_1f1b;
  options.stages = 2;
  const Schedule plain = plan_schedule(list, options);
  options.offload = true;
  const Schedule moved = plan_schedule(list, options);
  EXPECT_EQ(problems(moved), "");
  EXPECT_EQ(moved.stages[0], plain.stages[0]) << "the first stage has tokens";
  std::vector<Op> kept;
  std::vector<int> ahead;  // computations between a fetch and its recompute
  const std::vector<Op>& ops = moved.stages[1];
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    if (op.kind == OpKind::offload) {
      EXPECT_EQ(ops[i - 1], (Op{OpKind::forward, op.micro_batch, op.chunk}));
    } else if (op.kind == OpKind::fetch) {
      EXPECT_NE(std::find(ops.begin(), ops.begin() + static_cast<std::ptrdiff_t>(i),
                          Op{OpKind::offload, op.micro_batch, op.chunk}),
                ops.begin() + static_cast<std::ptrdiff_t>(i));
      ahead.push_back(0);
      for (std::size_t j = i + 1; ops.at(j) != Op{OpKind::recompute, op.micro_batch, op.chunk}; ++j)
        ahead.back() += computes(ops[j].kind);
    } else {
      kept.push_back(op);
    }
  }
  EXPECT_EQ(ahead, (std::vector<int>{1, 1}));
  EXPECT_EQ(kept, plain.stages[1]);
  EXPECT_EQ(moved.stages[1].size(), kept.size() + 4) << "two chunks of three are forwarded again";
}

TEST(PipelineSchedule, ForwardsAloneEvaluate) {
  const Schedule schedule = forward_schedule({{0, 1}, {2}}, 3);
  for (int s = 0; s < 3; ++s) {
    std::vector<int> order;
    for (const Op& op : schedule.stages[s])
      if (op.kind == OpKind::forward) order.push_back(op.micro_batch);
    EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  }
  EXPECT_TRUE(runs_with_buffers(schedule, 1));
}

TEST(PipelineSchedule, GroupsOfAList) {
  const std::vector<MicroBatch> list{{{{7, 0, 4, 0}}},
                                     {{{1, 0, 2, 0}, {2, 0, 2, 0}}},
                                     {{{7, 4, 8, 0}}},
                                     {{{3, 0, 4, 0}}},
                                     {{{7, 8, 9, 0}}}};
  EXPECT_EQ(chunk_groups(list), (ChunkGroups{{0, 2, 4}, {1}, {3}}));
  EXPECT_THROW(chunk_groups({{{{7, 4, 8, 0}}}}), Error);
  EXPECT_THROW(chunk_groups({{{{7, 0, 4, 0}}}, {{{7, 5, 8, 0}}}}), Error);
}

TEST(PipelineSchedule, BadInput) {
  EXPECT_THROW(gpipe_schedule({{0}}, 0), Error);
  EXPECT_THROW(one_f_one_b_schedule({{}}, 2), Error);
  EXPECT_THROW(state_aware_schedule({{0}}, 2, 0, proportional({1})), Error);
  EXPECT_TRUE(state_aware_schedule({}, 2, 1, proportional({})).stages[1].empty());
}

}  // namespace
}  // namespace ballast
