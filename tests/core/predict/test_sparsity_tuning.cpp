// Dynamic sparsity tuning against brute force over Equations 3 to 7, on random latency tables and
// coverage curves.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/base/error.hpp"
#include "core/predict/sparsity_tuning.hpp"
#include "core/predict/step_costs.hpp"
#include "core/predict/table_costs.hpp"
#include "tests/seed.hpp"

using namespace ballast;

namespace {

/// Random ascending budgets; one of them is the base.
std::vector<std::int64_t> random_budgets(std::mt19937_64& random) {
  std::vector<std::int64_t> list;
  const std::size_t count = 1 + random() % 12;
  for (std::int64_t k = 0; list.size() < count;)
    list.push_back(k += 1 + static_cast<std::int64_t>(random() % 20));
  return list;
}

/// Non-decreasing in (0, 1], with plateaus.
std::vector<double> random_coverage(std::mt19937_64& random, std::size_t size) {
  std::vector<double> c;
  std::uniform_real_distribution<> uniform(0, 1);
  for (std::size_t i = 0; i < size; ++i)
    c.push_back(i > 0 && random() % 4 == 0 ? c.back() : uniform(random));
  std::sort(c.begin(), c.end());
  return c;
}

}  // namespace

TEST(Dst, EquationsThreeToSevenAgainstBruteForce) {
  std::mt19937_64 random(test_seed());
  int compressed = 0, relaxed = 0, infeasible = 0;
  for (int round = 0; round < 100000; ++round) {
    const auto budgets = random_budgets(random);
    const auto coverage = random_coverage(random, budgets.size());
    // Latency at each budget, non-decreasing, and an anchor somewhere among them.
    std::vector<double> latency = random_coverage(random, budgets.size());
    const double anchor = std::uniform_real_distribution<>(0, 1.1)(random),
                 p = random() % 5 == 0 ? 0 : std::uniform_real_distribution<>(0, 0.6)(random);
    const std::size_t base = random() % budgets.size();
    // align (Equation 9), by search.
    std::int64_t aligned = budgets.front();
    for (std::size_t i = 0; i < budgets.size(); ++i)
      if (latency[i] <= anchor) aligned = budgets[i];
    const TuningTarget target{budgets[base], aligned, latency[base] > anchor};
    const std::int64_t chosen = final_budget(target, budgets, coverage, p);
    const auto at = static_cast<std::size_t>(std::find(budgets.begin(), budgets.end(), chosen) -
                                             budgets.begin());
    ASSERT_LT(at, budgets.size());
    if (!target.above_anchor) {
      // Idle micro-batches gain: the anchor's budget, never below the base, and nothing larger is
      // within the anchor.
      ++relaxed;
      ASSERT_EQ(chosen, aligned);
      ASSERT_GE(chosen, budgets[base]);
      ASSERT_LE(latency[at], anchor);
      ASSERT_LE(coverage_loss(target, budgets, coverage, chosen), 0);
      continue;
    }
    // Stragglers: the feasible set of Equation 6, else the smallest budget that keeps the bound.
    ++compressed;
    std::int64_t feasible = 0, kept = 0;
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      const bool bound = coverage[base] - coverage[i] <= p;
      if (bound && latency[i] <= anchor) feasible = budgets[i];
      if (bound && kept == 0) kept = budgets[i];
    }
    if (feasible == 0) ++infeasible;
    ASSERT_EQ(chosen, feasible > 0 ? feasible : kept) << "round " << round;
    ASSERT_LE(chosen, budgets[base]);
    ASSERT_LE(coverage_loss(target, budgets, coverage, chosen), p + 1e-15);
  }
  std::printf("compressed %d, relaxed %d, infeasible %d\n", compressed, relaxed, infeasible);
  EXPECT_GT(compressed, 10000);
  EXPECT_GT(relaxed, 10000);
  EXPECT_GT(infeasible, 1000);
}

TEST(Dst, MicroBatchesOfEqualLatencyKeepTheBaseBudget) {
  std::mt19937_64 random(test_seed());
  DstOptions options;
  options.base_budget = 8;
  int beside = 0;
  for (std::size_t n = 1; n <= 200; ++n) {
    const double latency = std::uniform_real_distribution<>(1e-4, 1)(random),
                 anchor = anchor_latency(Anchor::mean, std::vector<double>(n, latency));
    beside += anchor != latency;
    const TuningTarget target = tuning_target(latency, anchor, options, [] { return 1; });
    EXPECT_FALSE(target.above_anchor) << n << " of " << latency;
    EXPECT_EQ(target.anchor_budget, 8);
  }
  EXPECT_GT(beside, 0) << "no mean was rounded: the test saw nothing";
}

TEST(Dst, AnchorsAndTargetsOfABatch) {
  const std::vector<double> latencies{3, 1, 8};
  EXPECT_EQ(anchor_latency(Anchor::mean, latencies), 4);
  EXPECT_EQ(anchor_latency(Anchor::min, latencies), 1);
  EXPECT_EQ(anchor_latency(Anchor::max, latencies), 8);
  EXPECT_EQ(parse<Anchor>("max"), Anchor::max);
  EXPECT_EQ(parse<Anchor>("median"), std::nullopt);
  EXPECT_THROW(anchor_latency(Anchor::mean, {}), Error);

  ProfileTable table;
  table.block_tokens = 256;
  for (const ProfilePass pass : {ProfilePass::forward, ProfilePass::backward})
    for (std::int64_t n = 1024; n <= 32768; n *= 2) {
      table.rows.push_back({ProfilePart::rest,
                            {},
                            n,
                            0,
                            0,
                            1,
                            Recompute::none,
                            pass,
                            1e-7 * static_cast<double>(n),
                            0,
                            0});
      for (std::int64_t k = 4; k <= 128; k *= 2) {
        table.rows.push_back({ProfilePart::attention, PatternKind::moba, n, 0, k, 1,
                              Recompute::none, pass,
                              1e-10 * static_cast<double>(n) * mean_keys(n, 0, k, 256), 0, 0});
        if (k * 256 >= n) break;
      }
    }
  std::vector<std::string> notes;
  table = checked(table, 0.2, notes);
  const TableCosts costs("table", table, PatternKind::moba, {});
  std::mt19937_64 random(test_seed());
  SimulationOptions simulation;
  for (const Recompute mode : {Recompute::none, Recompute::full})
    for (const Anchor anchor : {Anchor::mean, Anchor::min, Anchor::max}) {
      StepPlan plan;
      plan.mesh.dp = 2;
      plan.lanes.resize(2);
      for (int i = 0; i < 8; ++i) {
        PlannedMicroBatch m;
        for (std::uint64_t s = 0; s < 1 + random() % 3; ++s)
          m.segments.push_back({0, 0, static_cast<std::int64_t>(random() % 30000), 0});
        m.group.first = i % 2;
        plan.lanes[static_cast<std::size_t>(i) % 2].micro_batches.push_back(i);
        plan.micro_batches.push_back(m);
      }
      simulation.dst = {anchor, 0.1, 32, default_candidates(32)};
      simulation.recompute.mode = mode;
      const auto targets = tuning_targets(plan, simulation, costs);
      const auto seconds = [&](const MicroBatch& m) {
        return layer_time(costs, m, 32, {}, mode).total_s();
      };
      ASSERT_EQ(targets.size(), 8u);
      std::vector<double> all;
      for (const auto& m : plan.micro_batches)
        if (m.micro_batch().tokens() > 0) all.push_back(seconds(m.micro_batch()));
      if (all.empty()) continue;
      const double t = anchor_latency(anchor, all);
      for (std::size_t i = 0; i < targets.size(); ++i) {
        const MicroBatch m = plan.micro_batches[i].micro_batch();
        if (m.tokens() == 0) continue;
        // The mean of other orders differs in its last bits.
        if (std::abs(seconds(m) - t) < 1e-12 * t) continue;
        EXPECT_EQ(targets[i].above_anchor, seconds(m) > t);
        EXPECT_EQ(targets[i].anchor_budget,
                  align_budget(costs, m, t, simulation.dst.candidates, {}, mode));
        if (anchor == Anchor::max) {
          EXPECT_FALSE(targets[i].above_anchor);
          EXPECT_GE(targets[i].anchor_budget, 32);
        }
      }
    }
  const auto candidates = default_candidates(32);
  EXPECT_EQ(candidates.front(), 4);
  EXPECT_EQ(candidates.back(), 128);
  EXPECT_TRUE(std::binary_search(candidates.begin(), candidates.end(), 32));
  EXPECT_EQ(default_candidates(1), (std::vector<std::int64_t>{1, 2, 3, 4}));

  // The policy keeps what it chose.
  const DstOptions options{Anchor::mean, 0.1, 4, {2, 4, 8}};
  DstPolicy policy(options, {4, 2, true});
  EXPECT_EQ(policy.choose(3, std::vector<double>{0.85, 0.9, 1}), 2);
  EXPECT_EQ(policy.choose(4, std::vector<double>{0.5, 0.9, 1}), 4);
  ASSERT_EQ(policy.choices().size(), 2u);
  EXPECT_EQ(policy.choices()[0].layer, 3);
  EXPECT_NEAR(policy.choices()[0].coverage_loss, 0.05, 1e-12);
  EXPECT_THROW(policy.choose(5, std::vector<double>{1}), Error);
}

TEST(Dst, ADeadBandAroundTheAnchorKeepsTheBase) {
  DstOptions options{Anchor::mean, 0.1, 4, {2, 4, 8}};
  options.dead_band = 0.05;
  const auto target = [&](double latency) {
    return tuning_target(latency, 1, options, [] { return std::int64_t{2}; });
  };
  EXPECT_EQ(target(1.04), (TuningTarget{4, 4, false}));
  EXPECT_EQ(target(0.96), (TuningTarget{4, 4, false}));
  EXPECT_EQ(target(1.06), (TuningTarget{4, 2, true}));
  EXPECT_EQ(target(0.94), (TuningTarget{4, 2, false}));
  EXPECT_EQ(target(1.052), (TuningTarget{4, 2, true})) << "a share of the anchor";
  EXPECT_EQ(target(0.9505), (TuningTarget{4, 4, false}));
  options.dead_band = 0;
  EXPECT_EQ(target(1.01), (TuningTarget{4, 2, true}));
}

TEST(Dst, ABoundOfTheStageIsSpentWhereCoverageIsFlat) {
  DstOptions options{Anchor::mean, 0.1, 8, {1, 2, 4, 6, 8, 16}};
  options.bound = CoverageBound::stage;
  const TuningTarget target{8, 4, true};
  const std::vector<double> steep{0.1, 0.2, 0.55, 0.88, 0.95, 1},
      flat{0.9, 0.91, 0.92, 0.93, 0.94, 1};
  LayerBudgets steep_first(options, target);
  EXPECT_EQ(steep_first.next(steep), 6);  // 4 would lose 0.4
  EXPECT_EQ(steep_first.next(flat), 2);   // takes those two blocks back
  LayerBudgets flat_first(options, target);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(flat_first.next(flat), 4);
  EXPECT_EQ(flat_first.next(steep), 4) << "five flat layers left 0.4 of their bounds";
}

TEST(DstSlow, ABoundOfTheStageHoldsAtEveryLayerAndAsksForNoMoreThanThatOfALayer) {
  std::mt19937_64 random(test_seed());
  std::uniform_real_distribution<double> draw(0, 1);
  std::int64_t lower = 0;
  for (int round = 0; round < 20000; ++round) {
    DstOptions each{Anchor::mean, 0.02 + 0.3 * draw(random), 16, default_candidates(16)};
    DstOptions stage = each;
    stage.bound = CoverageBound::stage;
    const bool above = draw(random) < 0.8;
    const auto base = static_cast<std::uint64_t>(
        std::find(each.candidates.begin(), each.candidates.end(), 16) - each.candidates.begin());
    const TuningTarget target{
        16, each.candidates[random() % (above ? base : each.candidates.size())], above};
    LayerBudgets by_layer(each, target), by_stage(stage, target);
    double lost = 0;
    for (int layer = 1; layer <= 12; ++layer) {
      std::vector<double> curve;
      for (std::size_t i = 0; i < each.candidates.size(); ++i) curve.push_back(draw(random));
      std::sort(curve.begin(), curve.end());
      const std::int64_t a = by_layer.next(curve), b = by_stage.next(curve);
      ASSERT_LE(b, a);
      ASSERT_TRUE(std::binary_search(each.candidates.begin(), each.candidates.end(), b));
      lower += b < a;
      if (!target.above_anchor) continue;
      lost += coverage_loss(target, each.candidates, curve, b);
      ASSERT_LE(lost, each.threshold * layer + 1e-9);
    }
  }
  EXPECT_GT(lower, 1000);
}
