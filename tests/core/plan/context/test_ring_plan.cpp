// Ring plans: replay of every rank, hand-checked small cases, and the times of MTraining Table 4.
#include <gtest/gtest.h>

#include <functional>

#include "core/base/error.hpp"
#include "core/plan/context/ring_plan.hpp"

namespace ballast {
namespace {

std::vector<RingPlan> all_ranks(int outer, int inner) {
  std::vector<RingPlan> plans;
  for (int r = 0; r < outer * inner; ++r) plans.push_back(plan_ring(r, outer, inner));
  return plans;
}

TEST(RingPlan, ReplaysOnEveryRingUpTo8x8) {
  for (int outer = 1; outer <= 8; ++outer)
    for (int inner = 1; inner <= 8; ++inner)
      EXPECT_EQ(problems(all_ranks(outer, inner)), "") << outer << " x " << inner;
  EXPECT_EQ(problems(all_ranks(1, 33)), "");
  EXPECT_EQ(problems(all_ranks(17, 1)), "");
}

TEST(RingPlan, BufferCountsAreTight) {
  for (const auto& [outer, inner] :
       {std::pair{1, 2}, {1, 5}, {3, 1}, {2, 2}, {2, 3}, {3, 2}, {4, 4}}) {
    for (auto member : {&RingPlan::kv_buffers, &RingPlan::dkv_buffers}) {
      auto plans = all_ranks(outer, inner);
      for (auto& plan : plans) plan.*member -= 1;
      EXPECT_NE(problems(plans).find("promises"), std::string::npos) << outer << " x " << inner;
    }
  }
}

TEST(RingPlan, FlatRingOfThree) {
  const RingPlan plan = plan_ring(1, 1, 3);
  ASSERT_EQ(plan.forward.size(), 3u);
  EXPECT_EQ(plan.forward[0].shard, 1);
  EXPECT_EQ(plan.forward[1].shard, 0);
  EXPECT_EQ(plan.forward[2].shard, 2);
  EXPECT_EQ(plan.forward[0].kv_inner, (RingHop{RingLevel::inner, 2, 0, 1, 0, 0}));
  EXPECT_EQ(plan.forward[1].kv_inner, (RingHop{RingLevel::inner, 2, 0, 0, 2, 1}));
  EXPECT_FALSE(plan.forward[2].kv_inner);
  ASSERT_EQ(plan.backward.size(), 4u);
  EXPECT_EQ(plan.backward[0].shard, -1);  // the first hop of keys has nothing beside it
  EXPECT_EQ(plan.backward[0].kv_inner, plan.forward[0].kv_inner);
  EXPECT_EQ(plan.backward[1].shard, 0);
  EXPECT_FALSE(plan.backward[0].dkv_inner || plan.backward[1].dkv_inner);
  EXPECT_EQ(plan.backward[2].shard, 2);
  EXPECT_EQ(plan.backward[2].dkv_inner, (RingHop{RingLevel::inner, 2, 0, 0, 2, 2}));
  EXPECT_EQ(plan.backward[3].shard, 1);  // the own shard, beside the hop home
  EXPECT_EQ(plan.backward[3].dkv_inner, (RingHop{RingLevel::inner, 2, 0, 2, 1, 3}));
  EXPECT_EQ(plan.kv_buffers, 2);
  EXPECT_EQ(plan.dkv_buffers, 3);  // this step's, one that leaves and one that arrives
}

TEST(RingPlan, SumsTakeThePlaceOfReceivedKv) {
  EXPECT_EQ(backward_buffers(plan_ring(0, 1, 1)), 2);
  // Two ranks: both KV and a sum; then one KV, the own sum, one that leaves, one that arrives.
  EXPECT_EQ(backward_buffers(plan_ring(0, 1, 2)), 4);
  for (const auto& [outer, inner] : {std::pair{1, 2}, {1, 5}, {3, 1}, {2, 2}, {2, 3}, {4, 4}})
    for (const RingPlan& plan : all_ranks(outer, inner)) {
      EXPECT_LE(backward_buffers(plan), 1 + plan.kv_buffers + plan.dkv_buffers);
      EXPECT_GT(backward_buffers(plan), plan.dkv_buffers);
    }
}

TEST(RingPlan, OneRankHasNoHops) {
  const RingPlan plan = plan_ring(0, 1, 1);
  for (const auto* steps : {&plan.forward, &plan.backward}) {
    ASSERT_EQ(steps->size(), 1u);
    EXPECT_EQ(steps->front().shard, 0);
    EXPECT_FALSE(steps->front().kv_inner || steps->front().kv_outer || steps->front().dkv_inner ||
                 steps->front().dkv_outer);
  }
}

TEST(RingPlan, HopsOfTwoLevels) {
  // Algorithm 2: outer hops carry the shard an outer step entered with, inner hops never leave the
  // node.
  for (int rank = 0; rank < 12; ++rank) {
    const RingPlan plan = plan_ring(rank, 3, 4);
    int kv_inner = 0, kv_outer = 0, dkv_inner = 0, dkv_outer = 0;
    for (const auto& step : plan.backward) {
      for (const auto* hop : {&step.kv_inner, &step.dkv_inner})
        if (*hop) {
          EXPECT_EQ((*hop)->to / 4, rank / 4);
        }
      for (const auto* hop : {&step.kv_outer, &step.dkv_outer})
        if (*hop) {
          EXPECT_EQ((*hop)->to, (rank + 4) % 12);
        }
      if (step.kv_outer) {
        EXPECT_EQ(step.inner, 0);
        EXPECT_EQ(step.kv_outer->send_shard, step.outer == 0 ? rank : step.shard);
        EXPECT_EQ(step.kv_outer->send_shard % 4, rank % 4);
      }
      if (&step == &plan.backward.back()) {  // the slowest hop goes beside the own shard
        EXPECT_TRUE(step.shard == rank && step.dkv_outer && !step.dkv_inner);
      }
      kv_inner += step.kv_inner.has_value(), kv_outer += step.kv_outer.has_value();
      dkv_inner += step.dkv_inner.has_value(), dkv_outer += step.dkv_outer.has_value();
    }
    EXPECT_EQ(kv_inner, 3 * 3);
    EXPECT_EQ(kv_outer, 2);
    EXPECT_EQ(dkv_inner, 3 * 3);  // a turn per node, from the rank after the one that entered with
                                  // the shard back to it
    EXPECT_EQ(dkv_outer, 2);
  }
}

TEST(RingPlan, DamageIsFound) {
  const auto damaged = [](const std::function<void(std::vector<RingPlan>&)>& damage) {
    auto plans = all_ranks(3, 3);
    damage(plans);
    return problems(plans);
  };
  EXPECT_NE(damaged([](auto& p) { p[4].forward[2].shard = 0; }), "");
  EXPECT_NE(damaged([](auto& p) { p[4].forward[1].kv_inner.reset(); }), "");
  EXPECT_NE(damaged([](auto& p) { p[4].forward[3].kv_outer->complete = 6; }), "");
  EXPECT_NE(damaged([](auto& p) {
              for (auto& q : p) q.backward[0].kv_outer->complete = 3;
            }),
            "");
  EXPECT_NE(damaged([](auto& p) {
              for (auto& q : p) q.backward.pop_back();
            }),
            "");
  EXPECT_NE(damaged([](auto& p) {
              for (auto& q : p) q.backward[7].dkv_outer.reset();
            }),
            "");
  EXPECT_NE(damaged([](auto& p) {
              for (auto& q : p) q.backward[7].dkv_outer->complete = 10;
            }),
            "");
  EXPECT_NE(damaged([](auto& p) { p[0].backward[5].dkv_inner->send_shard = 0; }), "");
  EXPECT_NE(damaged([](auto& p) { p[7].forward[4].release.push_back(1); }), "");
  EXPECT_NE(damaged([](auto& p) { p[7].forward[1].release.clear(); }), "");
  EXPECT_NE(damaged([](auto& p) { p[2].rank = 3; }), "");
  EXPECT_NE(damaged([](auto& p) { p.pop_back(); }), "");
  EXPECT_EQ(damaged([](auto&) {}), "");
  EXPECT_NE(problems(std::vector<RingPlan>{}), "");
}

TEST(RingPlan, BadSizesAreRefused) {
  EXPECT_THROW(plan_ring(0, 0, 4), Error);
  EXPECT_THROW(plan_ring(0, 4, 0), Error);
  EXPECT_THROW(plan_ring(8, 2, 4), Error);
  EXPECT_THROW(plan_ring(-1, 2, 4), Error);
}

TEST(RingPlan, HashTellsPlansApart) {
  EXPECT_EQ(plan_ring(3, 2, 4).hash(), plan_ring(3, 2, 4).hash());
  EXPECT_NE(plan_ring(3, 2, 4).hash(), plan_ring(2, 2, 4).hash());
  EXPECT_NE(plan_ring(3, 2, 4).hash(), plan_ring(3, 4, 2).hash());
  EXPECT_NE(plan_ring(3, 1, 8).hash(), plan_ring(3, 8, 1).hash());
}

// MTraining Table 4, in milliseconds; its naive ring crosses nodes at every step.
TEST(RingPlan, SimulatesMTrainingTable4) {
  const RingCosts forward{1.13, 2.08, 0.51, 0.13, 0.98};
  const RingCosts backward{1.86, 1.90, 2.65, 0.42, 3.40};  // KV and dKV in one message
  EXPECT_NEAR(simulate(plan_ring(0, 32, 1).forward, forward), 1.13 + 2.08 + 0.98 * 31 + 0.51,
              1e-9);  // 34.10
  EXPECT_NEAR(simulate(plan_ring(0, 32, 1).forward, backward), 1.86 + 1.90 + 3.40 * 31 + 2.65,
              1e-9);  // 111.81
  EXPECT_NEAR(simulate(plan_ring(5, 4, 8).forward, forward), 1.13 + 2.08 + 0.51 * 32,
              1e-9);  // 19.53
  EXPECT_NEAR(simulate(plan_ring(5, 4, 8).forward, backward), 1.86 + 1.90 + 2.65 * 32,
              1e-9);  // 88.56
}

TEST(RingPlan, OwnShardHidesTheHopHome) {
  const RingCosts costs{0, 0, 10, 1, 5, 2, 7};
  // The first hop of keys stands alone; with two levels the node's sum too, which the hop between
  // the nodes waits for.
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 1, 8).backward, costs), 1 + 80);
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 4, 8).backward, costs), 1 + 320 + 2);
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 8, 1).backward, costs),
                   5 + 10 + 5 * 12 + 10 + 10);  // 5 + 7 on one link outlast 10
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 2, 2).backward, {0, 0, 10, 1, 5, 2, 27}),
                   1 + 30 + 2 + 27);  // a hop home slower than a step shows
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 1, 1).backward, costs), 10);
  // A hop slower than a step delays the next one that needs it.
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 1, 3).forward, {0, 0, 1, 4}), 4 + 4 + 1);
  // The outer hop has a whole inner turn: 4 steps of 1 s hide up to 4 s.
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 2, 4).forward, {0, 0, 1, 0, 4}), 8);
  EXPECT_DOUBLE_EQ(simulate(plan_ring(0, 2, 4).forward, {0, 0, 1, 0, 6}), 10);
}

}  // namespace
}  // namespace ballast
