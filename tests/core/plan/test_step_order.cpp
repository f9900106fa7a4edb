// One list scheduler orders the operations of the whole step.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/step_order.hpp"
#include "core/plan/step_problems.hpp"
#include "tests/core/plan/step_plans.hpp"

namespace ballast {
namespace {

const std::vector<ScheduleKind> kSchedules = values_of<ScheduleKind>();

/// Costs of ids: forward one unit a token.
ScheduleCosts by_tokens(const StepPlan& plan) {
  std::vector<MicroBatch> all;
  for (const PlannedMicroBatch& m : plan.micro_batches) all.push_back(m.micro_batch());
  return schedule_costs({}, all);
}

void order(StepPlan& plan, const ScheduleKind schedule, int k = 1) {
  PipelineOptions options;
  options.schedule = schedule;
  options.stages = plan.mesh.pp;
  options.k = k;
  options.search = 3;
  order_step(plan, options, by_tokens(plan));
}

// Lists made by each rank alone deadlock here (StepProblems.FindsTheDeadlockOfListsMadeAlone).
TEST(StepOrder, SharedListsDoNotDeadlock) {
  for (const int zero : {0, 2})
    for (const ScheduleKind schedule : kSchedules) {
      StepPlan plan = test::placed(2, 2, {{0, 2}, {0, 1}, {0, 2}});
      plan.zero = zero;
      order(plan, schedule);
      EXPECT_EQ(problems(plan), "") << schedule << ", ZeRO " << zero;
      EXPECT_NE(plan.lanes[0].schedule, plan.lanes[1].schedule);
    }
}

// K bounds the micro-batches that live at once, also where ranks share some of them.
TEST(StepOrder, SharedListsKeepTheBoundOfLiveChunks) {
  for (const int k : {1, 2}) {
    StepPlan plan = test::placed(2, 4, {{0, 2}, {0, 1}, {0, 2}, {0, 1}, {0, 2}, {0, 2}, {0, 1}});
    order(plan, ScheduleKind::state_aware_1f1b, k);
    int most = 0;
    for (const int lane : {0, 1})
      for (std::size_t s = 0; s < 4; ++s) {
        int live = 0;
        for (const Op& op : plan.schedule(lane).stages[s]) {
          if (op.kind == OpKind::forward) ++live;
          if (op.kind == OpKind::backward) --live;
          EXPECT_LE(live, k + 3 - static_cast<int>(s)) << "K " << k << " stage " << s;
          most = std::max(most, live);
        }
      }
    EXPECT_EQ(most, k + 3) << "the bound is reached, so this shows something";
  }
}

// An op of lane 0 without its private micro-batch is lane 1's, in the same order.
TEST(StepOrder, ListsAreOneOrderRestricted) {
  for (const ScheduleKind schedule : kSchedules) {
    StepPlan plan =
        test::placed(2, 3, {{0, 2}, {0, 1}, {0, 2}, {0, 1}, {0, 2}}, {64, 96, 32, 16, 8});
    order(plan, schedule);
    for (std::size_t s = 0; s < 3; ++s) {
      std::vector<Op> restricted;
      for (Op op : plan.schedule(0).stages[s]) {
        if (op.micro_batch % 2 == 1) continue;
        op.micro_batch /= 2;
        restricted.push_back(op);
      }
      EXPECT_TRUE(restricted == plan.schedule(1).stages[s]) << schedule << " stage " << s;
    }
  }
}

TEST(StepOrder, RanksThatShareNothingOrAllGetTheBuildersSchedule) {
  for (const ScheduleKind name : kSchedules) {
    StepPlan plan = test::placed(4, 3, {{0, 1}, {1, 1}, {2, 2}, {0, 1}, {1, 1}, {2, 2}, {0, 1}},
                                 {64, 32, 16, 128, 8, 24, 48});
    order(plan, name);
    EXPECT_EQ(problems(plan), "");
    PipelineOptions options;
    options.schedule = name;
    options.stages = 3;
    options.search = 3;
    for (int d = 0; d < 4; ++d)
      EXPECT_TRUE(plan.schedule(d).stages == plan_schedule(plan.list(d), options).stages)
          << name << " rank " << d;
    EXPECT_EQ(plan.lanes[2].schedule, plan.lanes[3].schedule);
  }
}

// Two ranks that share one micro-batch each hold the same sample's chunks.
TEST(StepOrder, ChunksOfASampleThatComesTwice) {
  for (const ScheduleKind kind : kSchedules) {
    StepPlan plan = test::placed(2, 2, {{0, 1}, {1, 1}, {0, 1}, {1, 1}, {0, 2}});
    for (const std::size_t m : {0, 1, 2, 3}) {
      const std::int64_t begin = m < 2 ? 0 : 64;
      plan.micro_batches[m].segments = {{7, begin, begin + 64, 64}};
    }
    order(plan, kind);
    EXPECT_EQ(problems(plan), "") << name(kind);
  }
}

TEST(StepOrder, SchedulesAreStoredOnce) {
  std::vector<RankGroup> groups;
  for (int m = 0; m < 64; ++m) groups.push_back({m % 16, 1});
  StepPlan plan = test::placed(16, 4, groups);
  order(plan, ScheduleKind::one_f_one_b);
  EXPECT_EQ(plan.schedules.size(), 1u);
}

TEST(StepOrder, ReducesEveryRoundOnEveryRank) {
  StepPlan plan = test::placed(3, 2, {{0, 1}, {1, 1}, {0, 1}, {0, 1}});
  plan.zero = 2;
  order(plan, ScheduleKind::one_f_one_b);
  EXPECT_EQ(problems(plan), "");
  EXPECT_EQ(plan.rounds(), 4);
  for (int d = 0; d < 3; ++d)
    for (const auto& ops : plan.schedule(d).stages)
      EXPECT_EQ(std::count_if(ops.begin(), ops.end(),
                              [](const Op& op) { return op.kind == OpKind::collective; }),
                4);
}

// Rounds that ascend stay as given, so that a rank may be idle in one.
TEST(StepOrder, KeepsIdleRounds) {
  StepPlan plan = test::placed(2, 2, {{0, 1}, {1, 1}, {0, 1}, {1, 1}});
  const std::vector<int> rounds{0, 1, 1, 3};
  for (std::size_t m = 0; m < 4; ++m) plan.micro_batches[m].round = rounds[m];
  plan.zero = 2;
  order(plan, ScheduleKind::one_f_one_b);
  EXPECT_EQ(problems(plan), "");
  for (std::size_t m = 0; m < 4; ++m) EXPECT_EQ(plan.micro_batches[m].round, rounds[m]);
  EXPECT_EQ(plan.schedule(1).stages[0].front(), (Op{OpKind::collective, 0}));
}

TEST(StepOrder, ForwardsAlone) {
  StepPlan plan = test::placed(2, 2, {{0, 2}, {0, 1}, {1, 1}, {0, 2}});
  plan.backward = false;
  order(plan, ScheduleKind::one_f_one_b);
  EXPECT_EQ(problems(plan), "");
}

// Two parts, each of lists that differ, side by side: BALLAST_SANITIZE=thread finds what one writes
// and the other reads.
TEST(StepOrder, PartsThatShareNothingAreOrderedAtOnce) {
  StepPlan pair = test::placed(2, 2, {{0, 2}, {0, 1}, {0, 2}});
  order(pair, ScheduleKind::state_aware_1f1b);
  for (int times = 0; times < 20; ++times) {
    StepPlan both = test::placed(4, 2, {{0, 2}, {0, 1}, {0, 2}, {2, 2}, {2, 1}, {2, 2}});
    order(both, ScheduleKind::state_aware_1f1b);
    EXPECT_EQ(problems(both), "");
    for (int lane = 0; lane < 4; ++lane)
      EXPECT_EQ(both.schedule(lane).stages, pair.schedule(lane % 2).stages);
  }
}

TEST(StepOrder, RefusesListsOutOfOrder) {
  StepPlan plan = test::placed(1, 1, {{0, 1}, {0, 1}});
  std::swap(plan.lanes[0].micro_batches[0], plan.lanes[0].micro_batches[1]);
  EXPECT_THROW(order(plan, ScheduleKind::one_f_one_b), Error);
}

/// Random lists over random groups of adjacent ranks, some samples in chunks.
class RandomPlans {
 public:
  explicit RandomPlans(std::uint64_t seed) : seed_(seed) {}
  int draw(int n) {
    return static_cast<int>(random_bits(seed_, stream_of("step_order"), count_++) %
                            static_cast<std::uint64_t>(n));
  }
  /// `widest`: most ranks that share a micro-batch.
  StepPlan plan(int widest = 6) {
    const int dp = 1 + draw(6), stages = 1 + draw(4), micro_batches = draw(9);
    std::vector<RankGroup> groups;
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> begin, sample;
    for (int m = 0; m < micro_batches; ++m) {
      const int ranks = 1 + draw(std::min(widest, dp)), chunks = draw(3) == 0 ? 1 + draw(5) : 1;
      const RankGroup group{draw(dp - ranks + 1), ranks};
      for (int c = 0; c < chunks; ++c) {
        groups.push_back(group);
        tokens.push_back(16);
        begin.push_back(16 * c);
        sample.push_back(m);
      }
      tokens.back() = 1 + draw(16);
    }
    StepPlan plan = test::placed(dp, stages, groups, tokens);
    for (std::size_t m = 0; m < groups.size(); ++m) {
      Segment& s = plan.micro_batches[m].segments[0];
      s.begin = begin[m];
      s.end += begin[m];
      s.sample = sample[m];
      plan.micro_batches[m].chunk = static_cast<int>(begin[m] / 16);
    }
    plan.zero = draw(3);
    return plan;
  }

 private:
  std::uint64_t seed_, count_ = 0;
};

TEST(StepOrderSlow, RandomPlansReplayWithoutDeadlock) {
  int shared = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    RandomPlans random(seed);
    StepPlan plan = random.plan();
    const ScheduleKind schedule = kSchedules[static_cast<std::size_t>(random.draw(4))];
    order(plan, schedule, 1 + random.draw(3));
    ASSERT_EQ(problems(plan), "") << "seed " << seed << " " << schedule;
    shared += plan.schedules.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(shared, 1000);
}

/// The ranks of a stage meet inside a round's last backward, before it sends anything.
void meet_in_backwards(StepPlan& plan) {
  for (Schedule& schedule : plan.schedules)
    for (std::vector<Op>& ops : schedule.stages) {
      const std::vector<char> ends = ends_gradients(ops);
      for (std::size_t i = 0; i < ops.size(); ++i) {
        if (ends[i] == 0) continue;
        std::size_t joins = i + 1;
        while (ops.at(joins).kind == OpKind::send) ++joins;
        ASSERT_EQ(ops[joins].kind, OpKind::collective);
        std::rotate(ops.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                    ops.begin() + static_cast<std::ptrdiff_t>(joins),
                    ops.begin() + static_cast<std::ptrdiff_t>(joins) + 1);
      }
    }
}

void meetings_in_backwards(std::uint64_t seeds) {
  std::uint64_t met = 0, several = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    RandomPlans random(seed);
    StepPlan plan = random.plan(seed % 4 == 0 ? 6 : 1);
    plan.zero = 2;
    const ScheduleKind schedule = kSchedules[static_cast<std::size_t>(random.draw(4))];
    order(plan, schedule, 1 + random.draw(3));
    if (!plan.meets_in_backward()) continue;
    meet_in_backwards(plan);
    ASSERT_EQ(problems(plan), "") << "seed " << seed << " " << schedule;
    ++met;
    several += plan.schedules.size() > 1 ? 1u : 0u;
  }
  EXPECT_GT(met, seeds / 2);
  EXPECT_GT(several, seeds / 4) << "ranks with other lists";
}
TEST(StepOrder, RanksMayMeetInsideBackwards) { meetings_in_backwards(300); }
TEST(StepOrderSlow, RanksMayMeetInsideBackwards) { meetings_in_backwards(3000); }

TEST(StepOrder, RanksWithPartsInCommonMeetAfterBackwards) {
  StepPlan plan = test::placed(2, 2, {{0, 2}, {0, 1}, {1, 1}});
  plan.zero = 2;
  order(plan, ScheduleKind::one_f_one_b);
  EXPECT_FALSE(plan.meets_in_backward());
  plan = test::placed(2, 2, {{0, 2}, {0, 2}});
  order(plan, ScheduleKind::one_f_one_b);
  EXPECT_TRUE(plan.meets_in_backward());
  plan.backward = false;
  EXPECT_FALSE(plan.meets_in_backward());
}

// Two ops of a list exchanged, or one lost: found wherever that changes what waits for what.
void random_damage(int trials) {
  int lost = 0, exchanged = 0, found = 0;
  for (int seed = 0; seed < trials; ++seed) {
    RandomPlans random(static_cast<std::uint64_t>(seed));
    StepPlan plan = random.plan();
    order(plan, kSchedules[static_cast<std::size_t>(random.draw(4))], 1 + random.draw(3));
    if (plan.schedules.empty()) continue;
    Schedule& schedule = plan.schedules[static_cast<std::size_t>(
        random.draw(static_cast<int>(plan.schedules.size())))];
    auto& ops = schedule.stages[static_cast<std::size_t>(random.draw(plan.mesh.pp))];
    if (ops.size() < 2) continue;
    StepPlan damaged = plan;
    auto& list = damaged.schedules[static_cast<std::size_t>(&schedule - plan.schedules.data())]
                     .stages[static_cast<std::size_t>(&ops - schedule.stages.data())];
    const auto at = list.begin() + random.draw(static_cast<int>(list.size()));
    // Recomputes stand for themselves: without one, backward runs from what forward kept.
    if (at->kind != OpKind::recompute) {
      list.erase(at);
      EXPECT_NE(problems(damaged), "") << "seed " << seed << ": an op is lost";
      ++lost;
    }
    // The first and the last op of a list exchanged: a backward before its forward, or a transfer
    // or a collective in its place.
    if (ops.front() == ops.back()) continue;
    damaged = plan;
    auto& other = damaged.schedules[static_cast<std::size_t>(&schedule - plan.schedules.data())]
                      .stages[static_cast<std::size_t>(&ops - schedule.stages.data())];
    std::swap(other.front(), other.back());
    ++exchanged;
    found += problems(damaged).empty() ? 0 : 1;
  }
  EXPECT_GT(lost, trials * 7 / 10);
  EXPECT_GT(exchanged, trials * 7 / 10);
  EXPECT_EQ(found, exchanged);
}
TEST(StepOrder, RandomDamageIsFound) { random_damage(250); }
TEST(StepOrderSlow, RandomDamageIsFound) { random_damage(1000); }

}  // namespace
}  // namespace ballast
