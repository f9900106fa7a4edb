// Choices by share of mass, and what caps take from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>

#include "core/plan/attention/pattern_selection.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

TEST(TopShare, OverflowCountsElementsAndTheirMass) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 2000; ++round) {
    std::vector<MassItem> items;
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < 40; ++i) {
      items.push_back({i, static_cast<std::int64_t>(random() % 1000)});
      total += items.back().mass;
    }
    const double share = 0.05 + 0.9 * static_cast<double>(random() % 1000) / 1000;
    const auto cap = static_cast<std::int64_t>(1 + random() % 20);
    const Selection all = top_share(items, total, share, 0),
                    kept = top_share(items, total, share, cap);
    EXPECT_EQ(all.overflow, 0);
    EXPECT_EQ(all.overflow_mass, 0);
    const auto mass = [&](const std::vector<std::int64_t>& chosen) {
      return std::accumulate(chosen.begin(), chosen.end(), std::int64_t{0},
                             [&](std::int64_t sum, std::int64_t i) {
                               return sum + items[static_cast<std::size_t>(i)].mass;
                             });
    };
    EXPECT_LE(std::ssize(kept.chosen), cap);
    EXPECT_EQ(std::ssize(kept.chosen) + kept.overflow, std::ssize(all.chosen));
    EXPECT_EQ(mass(kept.chosen) + kept.overflow_mass, mass(all.chosen));
  }
}

TEST(TopShare, ElementsThatAreComputedAnywayAreNotLeftOut) {
  std::mt19937_64 random(test_seed());
  std::int64_t spared = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<MassItem> items;
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < 40; ++i) {
      items.push_back({i, static_cast<std::int64_t>(random() % 20)});  // with ties
      total += items.back().mass;
    }
    const auto cap = static_cast<std::int64_t>(1 + random() % 20),
               given = static_cast<std::int64_t>(random() % 41);
    const Selection all = top_share(items, total, 0.8, 0),
                    kept = top_share(items, total, 0.8, cap, given);
    EXPECT_EQ(kept.chosen, top_share(items, total, 0.8, cap).chosen);
    std::int64_t count = 0, mass = 0;
    for (const std::int64_t i : all.chosen) {
      if (std::binary_search(kept.chosen.begin(), kept.chosen.end(), i)) continue;
      spared += i < given;
      if (i < given) continue;
      ++count;
      mass += items[static_cast<std::size_t>(i)].mass;
    }
    EXPECT_EQ(kept.overflow, count);
    EXPECT_EQ(kept.overflow_mass, mass);
  }
  EXPECT_GT(spared, 0);
}

TEST(TopShare, AnExactShareTakesNoFurtherItem) {
  const std::vector<MassItem> items{{0, 1}, {1, 4}, {2, 2}, {3, 1}};
  EXPECT_EQ(top_share(items, 8, 0.75, 0).chosen, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(top_share(items, 8, 0.76, 0).chosen, (std::vector<std::int64_t>{0, 1, 2}));
}

TEST(ChooseVerticalSlash, OverflowMassIsTheLargerShareThatACapLeavesOut) {
  HeadMass mass;
  mass.slashes = {50, 30, 20};
  mass.total = 100;
  mass.columns = {{{0, 40}, {70, 35}, {130, 25}}};
  AttentionOptions options;
  options.vertical_share = 0.95, options.slash_share = 0.9;  // all three of either
  EXPECT_EQ(choose_vertical_slash(mass, options).overflow_mass, 0);
  options.max_slashes = 2;  // loses 20
  options.max_columns = 1;  // loses 60
  const HeadChoice choice = choose_vertical_slash(mass, options);
  EXPECT_EQ(choice.overflow, 3);
  EXPECT_DOUBLE_EQ(choice.overflow_mass, 0.6);
}

TEST(ChooseVerticalSlash, CapsLeaveOutNeitherTheDiagonalNorTheSink) {
  HeadMass mass;
  mass.slashes = {10, 60, 30};
  mass.total = 100;
  mass.columns = {{{3, 5}, {63, 10}, {64, 50}, {130, 35}}};
  AttentionOptions options;
  options.vertical_share = 0.99, options.slash_share = 0.99;  // all of either
  options.max_slashes = 1;                                    // slash 1: 2 goes, 0 stays
  options.max_columns = 1;  // key 64: 130 goes, those of the first block stay
  HeadChoice choice = choose_vertical_slash(mass, options);
  EXPECT_EQ(choice.head.slashes, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(choice.head.columns, (std::vector<std::int64_t>{64}));
  EXPECT_EQ(choice.overflow, 2);
  EXPECT_DOUBLE_EQ(choice.overflow_mass, 0.35);
  options.max_slashes = 2, options.max_columns = 2;
  choice = choose_vertical_slash(mass, options);
  EXPECT_EQ(choice.head.columns, (std::vector<std::int64_t>{64, 130}));
  EXPECT_EQ(choice.overflow, 0) << "all that the caps drop is computed";
  EXPECT_EQ(choice.overflow_mass, 0);
}

}  // namespace
}  // namespace ballast
