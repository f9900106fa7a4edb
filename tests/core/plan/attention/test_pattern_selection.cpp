// Choices by share of mass, and what caps take from them.
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace ballast
