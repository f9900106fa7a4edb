// Group auto-selection against the paper's own figures and a plain search; times of Batch plans by
// hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "core/base/error.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/predict/group_selection.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

MicroBatch pack_of(std::int64_t tokens, int sp = 1, int recompute = -1) {
  MicroBatch pack;
  if (tokens > 0) pack.segments.push_back({0, 0, tokens, 0});
  pack.sp = sp;
  pack.recompute_layers = recompute;
  return pack;
}

std::vector<MicroBatch> one_pack(std::int64_t tokens) { return {pack_of(tokens)}; }

TEST(GroupSelection, PicksThePapersGroups) {
  // HBP Table 19: iteration times of the best settings at equal tokens an iteration; other degrees
  // are slower.
  const std::map<std::int64_t, std::pair<int, double>> table{{8192, {2, 2.69}},
                                                             {16384, {1, 2.65}},
                                                             {32768, {8, 2.83}},
                                                             {65536, {4, 3.01}},
                                                             {131072, {8, 3.05}}};
  PackCosts costs;
  costs.seconds = [&](const MicroBatch& pack, int ranks, int) {
    const auto& [best, seconds] = table.at(pack.tokens());
    return (seconds + (ranks == best ? 0 : 1)) * static_cast<double>(pack.tokens()) / ranks;
  };
  costs.bytes = [](std::span<const PackGroup>) { return 0.0; };
  const GroupSearch search{{8192, 16384, 32768, 65536, 131072}, {1, 2, 4, 8}, 32, 0};
  const GroupSelection found = select_groups(search, one_pack, costs);
  ASSERT_EQ(found.groups.size(), 2u) << "128K over 8 ranks is 16K, which is the best length itself";
  EXPECT_EQ(found.groups[0].tokens, 16384);
  EXPECT_EQ(found.groups[0].ranks, 1);
  EXPECT_EQ(found.groups[1].tokens, 131072);
  EXPECT_EQ(found.groups[1].ranks, 8);
  EXPECT_EQ(found.trials.size(), 5u * 4u);
}

TEST(GroupSelection, DerivesTheLengthsThatNeedNoCommunication) {
  // Figure 3: the best length is 32K over 2 ranks, so 16K packs on one rank join; 128K over 2 ranks
  // gives 64K.
  PackCosts costs;
  costs.seconds = [](const MicroBatch& pack, int ranks, int) {
    const double t = static_cast<double>(pack.tokens());
    const double per_token = (pack.tokens() == 32768 ? 1 : 2) + (ranks == 2 ? 0 : 1);
    return per_token * t / ranks;
  };
  costs.bytes = [](std::span<const PackGroup>) { return 0.0; };
  const GroupSelection found = select_groups({{32768, 131072}, {1, 2, 4}, 8, 0}, one_pack, costs);
  std::vector<std::pair<std::int64_t, int>> groups;
  for (const PackGroup& g : found.groups) groups.emplace_back(g.tokens, g.ranks);
  EXPECT_EQ(groups, (std::vector<std::pair<std::int64_t, int>>{
                        {16384, 1}, {32768, 2}, {65536, 2}, {131072, 2}}));
  EXPECT_TRUE(problems(found.groups, 4).empty());
}

TEST(GroupSelection, RecomputesAsFewLayersAsFit) {
  const auto seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> draw(0.1, 1);
  for (int round = 0; round < 200; ++round) {
    GroupSearch search{{1000}, {1}, static_cast<int>(1 + random() % 40), 100 * draw(random)};
    const double fixed = 60 * draw(random), layer = 6 * draw(random), input = 0.2 * layer;
    PackCosts costs;
    const auto bytes = [&](int layers) {
      return fixed + layer * (search.layers - layers) + input * layers;
    };
    costs.bytes = [&](std::span<const PackGroup> one) { return bytes(one[0].recompute_layers); };
    int expected = 0;
    while (expected <= search.layers && bytes(expected) > search.memory_bytes) ++expected;
    EXPECT_EQ(recomputed_layers(1000, 1, search, costs), expected > search.layers ? -1 : expected);
  }
}

TEST(GroupSelection, MemoryNeedNotFallEvenlyWithTheLayers) {
  PackCosts costs;
  costs.bytes = [](std::span<const PackGroup> one) {
    const int layers = one[0].recompute_layers;
    return layers < 8 ? 100.0 - layers : 10.0;
  };
  EXPECT_EQ(recomputed_layers(1000, 1, {{1000}, {1}, 10, 50}, costs), 8);
}

TEST(GroupSelection, MemoryForcesADegreeOrIsRefused) {
  PackCosts costs;
  costs.seconds = [](const MicroBatch& pack, int ranks, int layers) {
    return static_cast<double>(pack.tokens()) * (1 + 0.1 * ranks + 0.1 * layers) / ranks;
  };
  costs.bytes = [](std::span<const PackGroup> one) {
    return static_cast<double>(one[0].tokens) / one[0].ranks * (10 - one[0].recompute_layers);
  };
  const GroupSelection found = select_groups({{100, 800}, {1, 2, 4}, 8, 1000}, one_pack, costs);
  ASSERT_GE(found.groups.size(), 2u);
  for (const PackGroup& g : found.groups) EXPECT_LE(costs.bytes(std::span(&g, 1)), 1000);
  EXPECT_GT(found.groups.back().ranks, 1) << "one rank could not hold it";
  EXPECT_TRUE(std::isinf(found.trials[3].token_s)) << "800 tokens on one rank";
  EXPECT_THROW(select_groups({{100, 8000}, {1, 2, 4}, 8, 1000}, one_pack, costs), Error);
  EXPECT_THROW(select_groups({{}, {1}, 8, 0}, one_pack, costs), Error);
}

/// Layers that are kept for backward beside buffers that grow with a pack's tokens.
PackCosts kept_beside_buffers(int layers) {
  PackCosts costs;
  costs.seconds = [](const MicroBatch& pack, int ranks, int recomputed) {
    const auto t = static_cast<double>(pack.tokens());
    return t * (1 + t / 8000 + 0.2 * (ranks - 1) + 0.05 * recomputed) / ranks;
  };
  const auto bytes = [layers](std::span<const PackGroup> groups) {
    double kept = 0, buffers = 0;
    for (const PackGroup& g : groups) {
      const double part = static_cast<double>(g.tokens) / g.ranks;
      kept = std::max(kept, part * (layers - g.recompute_layers));
      buffers = std::max(buffers, 2.0 * static_cast<double>(g.tokens));
    }
    return kept + buffers;
  };
  costs.bytes = bytes;
  costs.step_bytes = [bytes](const std::vector<StepPlan>& steps,
                             std::span<const PackGroup> groups) {
    return (1 + 0.01 * static_cast<double>(steps.size())) * bytes(groups);
  };
  return costs;
}

TEST(GroupSelection, PacksOfAllGroupsOfAStepKeepWithinTheLimitTogether) {
  const auto seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  int exceeded = 0, several = 0;
  for (int round = 0; round < 200; ++round) {
    const int layers = static_cast<int>(2 + random() % 30);
    const PackCosts costs = kept_beside_buffers(layers);
    GroupSearch search{{500, 1000, 2000, 4000}, {1, 2, 4}, layers, 0};
    search.memory_bytes = 8000 + static_cast<double>(random() % (4000 * layers));
    GroupedRun run;  // whose own packs take 3 % more than full ones
    run.seconds = [](const auto& groups) { return 1.0 / static_cast<double>(groups.size()); };
    run.first_steps = [](const auto&) { return std::vector<StepPlan>(3); };
    exceeded += costs.bytes(select_groups(search, one_pack, costs).groups) > search.memory_bytes;
    const GroupSelection found =
        select_groups_together(search, one_pack, costs, run, random() % 2 == 0);
    if (found.groups.size() > 1) EXPECT_LE(found.bytes, search.memory_bytes);
    EXPECT_LE(costs.bytes(found.groups), search.memory_bytes);
    EXPECT_EQ(found.bytes, costs.step_bytes(run.first_steps(found.groups), found.groups));
    EXPECT_EQ(found.groups.back().tokens, 4000);
    EXPECT_TRUE(problems(found.groups, 4).empty());
    several += found.groups.size() > 1;
  }
  EXPECT_GT(exceeded, 20);
  EXPECT_GT(several, 100);
}

TEST(GroupSelection, RefinementEndsWhereNoSingleChangeHelps) {
  const auto seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  int improved = 0;
  for (int round = 0; round < 200; ++round) {
    GroupSelection found;
    std::map<std::pair<std::int64_t, int>, double> gain;
    for (const std::int64_t tokens : {100, 200, 400, 800})
      for (const int ranks : {1, 2, 4}) {
        const bool fits = tokens == 800 || random() % 5 > 0;
        found.trials.push_back(
            {tokens, ranks, static_cast<int>(random() % 3), 0, fits ? 1.0 : INFINITY});
        gain[{tokens, ranks}] = std::uniform_real_distribution<>(-10, 10)(random);
      }
    found.groups = {{800, 2, found.trials[10].recompute_layers}};
    const auto seconds = [&](const std::vector<PackGroup>& groups) {
      double sum = 100;
      for (const PackGroup& g : groups) sum += gain.at({g.tokens, g.ranks});
      return sum;
    };
    const std::vector<PackGroup> refined = refine_groups(found, seconds);
    EXPECT_TRUE(problems(refined, 4).empty());
    EXPECT_EQ(refined.back().tokens, 800);
    EXPECT_LE(seconds(refined), seconds(found.groups));
    improved += seconds(refined) < seconds(found.groups);
    // Every sound choice of settings, 4^3 * 3 of them; those that differ in one length are no
    // better.
    std::map<std::int64_t, int> mine;
    for (const PackGroup& g : refined) mine[g.tokens] = g.ranks;
    for (int code = 0; code < 256; ++code) {
      std::vector<PackGroup> other;
      int apart = 0;
      bool there = true;
      for (int l = 0, rest = code; l < 4; ++l, rest /= 4) {
        const std::int64_t tokens = 100 << l;
        const int ranks = rest % 4 == 3 ? 0 : 1 << (rest % 4);
        apart += ranks != (mine.count(tokens) ? mine[tokens] : 0);
        if (ranks == 0) continue;
        there = there &&
                std::isfinite(found.trials[static_cast<std::size_t>(3 * l + rest % 4)].token_s);
        other.push_back({tokens, ranks, 0});
      }
      if (!there || apart != 1 || other.empty() || other.back().tokens != 800 ||
          !problems(other, 4).empty())
        continue;
      EXPECT_GE(seconds(other), seconds(refined) * 0.999 - 1e-9);
    }
    for (const PackGroup& g : refined) {
      const auto trial = std::find_if(
          found.trials.begin(), found.trials.end(),
          [&](const GroupTrial& t) { return t.tokens == g.tokens && t.ranks == g.ranks; });
      EXPECT_EQ(g.recompute_layers, trial->recompute_layers);
      EXPECT_TRUE(std::isfinite(trial->token_s)) << "what does not fit is never taken";
    }
  }
  EXPECT_GT(improved, 100);
}

}  // namespace
}  // namespace ballast
