// What budgets buy of a vertical-slash pattern: the coverage told is the mass of the pairs that the
// pattern computes; purchases are nested and each is the best one left.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>

#include "core/plan/attention/coverage.hpp"
#include "core/plan/attention/slash_purchases.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"

namespace ballast {
namespace {

/// Observed mass of `windows` blocks of 64 queries: those at the end of a segment, or these.
struct Window {
  std::int64_t blocks = 1, windows = 1;
  std::vector<std::vector<std::int64_t>> mass;  ///< [window][key]
  std::vector<std::int64_t> block_of{};         ///< [window]; empty: the last ones

  HeadMass head() const {
    HeadMass m;
    m.slashes.assign(static_cast<std::size_t>(blocks), 0);
    for (std::int64_t w = 0; w < windows; ++w) {
      m.columns.emplace_back();
      m.query_block.push_back(query_block(w));
      for (std::int64_t j = 0; j < blocks * kBlock; ++j)
        if (mass[w][j] > 0) {
          m.columns[w].push_back({j, mass[w][j]});
          m.slashes[query_block(w) - j / kBlock] += mass[w][j];
          m.total += mass[w][j];
        }
    }
    return m;
  }
  std::int64_t query_block(std::int64_t w) const {
    return block_of.empty() ? blocks - windows + w : block_of[static_cast<std::size_t>(w)];
  }
  /// Mass on the pairs of the pattern that is built from a choice, pair by pair.
  std::int64_t held(const VerticalSlash& choice) const {
    const AxisRange all{0, 0, blocks * kBlock};
    AttentionAxes axes;
    axes.align = kBlock;
    axes.first_query = {0};
    axes.queries = {all};
    axes.keys = {{all}};
    const AttentionPattern pattern =
        vertical_slash_pattern(axes.queries, key_axis(axes), {{choice}}, true);
    std::int64_t sum = 0;
    for (std::int64_t w = 0; w < windows; ++w)
      for (std::int64_t j = 0; j < blocks * kBlock; ++j)
        if (mass[w][j] > 0 && computed(pattern, 0, query_block(w) * kBlock + kBlock - 1, j))
          sum += mass[w][j];
    return sum;
  }
};

Window random_window(std::mt19937_64& random, std::int64_t blocks, std::int64_t windows) {
  Window x{blocks, windows, {}};
  if (random() % 2 == 0) {  // anywhere in the segment
    std::vector<std::int64_t> all(static_cast<std::size_t>(blocks));
    std::iota(all.begin(), all.end(), std::int64_t{0});
    std::sample(all.begin(), all.end(), std::back_inserter(x.block_of), windows, random);
  }
  const std::int64_t most = random() % 2 == 0 ? 5 : std::int64_t{1} << 40;  // ties, or none
  for (std::int64_t w = 0; w < windows; ++w) {
    x.mass.emplace_back(static_cast<std::size_t>(blocks * kBlock), 0);
    for (std::int64_t j = 0; j < (x.query_block(w) + 1) * kBlock; ++j) {
      const bool heavy = x.query_block(w) - j / kBlock < 2 || j % 37 == 5;
      if (random() % 3 != 0)
        x.mass[w][j] = static_cast<std::int64_t>(random() % most) * (heavy ? 20 : 1);
    }
  }
  return x;
}

TEST(SlashPurchases, CoverageToldIsTheMassOfThePairsThatTheChoiceComputes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 40 && !::testing::Test::HasFailure(); ++trial) {
    const auto blocks = static_cast<std::int64_t>(1 + random() % 12);
    const Window window =
        random_window(random, blocks,
                      1 + static_cast<std::int64_t>(random() % std::min<std::int64_t>(3, blocks)));
    AttentionOptions options;
    options.max_columns = random() % 2 == 0 ? 0 : 100;
    const std::vector<std::int64_t> budgets{1, 2, 3, 4, 5, 7, 9, 12, 200};
    const HeadMass mass = window.head();
    const SlashPurchases made(mass, budgets, options);
    VerticalSlash before;
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      const VerticalSlash choice = made.choice(i);
      EXPECT_EQ(made.coverage()[i],
                mass.total == 0 ? std::llrint(kCoverageUnit)
                                : std::llrint(static_cast<double>(window.held(choice)) /
                                              static_cast<double>(mass.total) * kCoverageUnit))
          << "budget " << budgets[i];
      const auto columns = static_cast<std::int64_t>(choice.columns.size());
      EXPECT_LE(static_cast<std::int64_t>(choice.slashes.size()) + (columns + 63) / 64,
                std::max<std::int64_t>(1, budgets[i] - 1));
      if (options.max_columns > 0) {
        EXPECT_LE(columns, options.max_columns);
      }
      EXPECT_TRUE(std::includes(choice.slashes.begin(), choice.slashes.end(),
                                before.slashes.begin(), before.slashes.end()));
      EXPECT_TRUE(std::includes(choice.columns.begin(), choice.columns.end(),
                                before.columns.begin(), before.columns.end()));
      before = choice;
    }
    EXPECT_EQ(static_cast<std::int64_t>(before.slashes.size()), blocks) << "200 blocks are dense";
    EXPECT_EQ(made.coverage().back(), std::llrint(kCoverageUnit));
  }
}

TEST(SlashPurchasesSlow, EachIsTheBestOneLeft) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 4 && !::testing::Test::HasFailure(); ++trial) {
    const Window window = random_window(random, 8, 2);
    std::vector<std::int64_t> budgets(10);
    for (std::size_t i = 0; i < budgets.size(); ++i) budgets[i] = static_cast<std::int64_t>(i) + 1;
    const SlashPurchases made(window.head(), budgets, {});
    for (std::size_t i = 2; i < budgets.size(); ++i) {
      const VerticalSlash at = made.choice(i - 1);
      std::int64_t best = 0;
      for (std::int32_t d = 0; d < 8; ++d) {
        VerticalSlash more = at;
        more.slashes.push_back(d);
        std::sort(more.slashes.begin(), more.slashes.end());
        more.slashes.erase(std::unique(more.slashes.begin(), more.slashes.end()),
                           more.slashes.end());
        best = std::max(best, window.held(more));
      }
      std::vector<MassItem> gains;
      for (std::int64_t j = 0; j < 8 * kBlock; ++j) {
        VerticalSlash more = at;
        more.columns.insert(std::lower_bound(more.columns.begin(), more.columns.end(), j), j);
        if (!std::binary_search(at.columns.begin(), at.columns.end(), j))
          gains.push_back({j, window.held(more) - window.held(at)});
      }
      std::int64_t columns = window.held(at);
      for (const MassItem& gain : heaviest(gains, kBlock)) columns += gain.mass;
      EXPECT_EQ(window.held(made.choice(i)), std::max(best, columns)) << "block " << i + 1;
    }
  }
}

/// Local attention puts its mass on the diagonal and on the last keys alike: these 64 keys as
/// columns add nothing.
TEST(SlashPurchases, KeysUnderTheDiagonalAreNotBoughtAgain) {
  Window window{16, 1, {std::vector<std::int64_t>(16 * kBlock, 0)}};
  for (std::int64_t j = 15 * kBlock; j < 16 * kBlock; ++j) window.mass[0][j] = 900;
  for (std::int64_t j = 5; j < 15 * kBlock; j += 10) window.mass[0][j] = 10;
  const SlashPurchases made(window.head(), {2, 3}, {});
  EXPECT_EQ(made.coverage()[0], std::llrint(57660.0 / (57600 + 960) * kCoverageUnit));
  ASSERT_EQ(made.choice(1).columns.size(), 64u);
  EXPECT_EQ(made.choice(1).columns.front(), 65);
  EXPECT_EQ(made.coverage()[1], std::llrint((57660.0 + 640) / (57600 + 960) * kCoverageUnit));
}

}  // namespace
}  // namespace ballast
