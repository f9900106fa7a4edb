// Heterogeneous sequence-parallel groups from a search over length buckets.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "core/base/error.hpp"
#include "core/plan/batch/rivals/flexsp.hpp"
#include "core/plan/batch/rivals/group_lists.hpp"
#include "tests/core/plan/batch/rivals/placements.hpp"

namespace ballast {
namespace {

TEST(FlexSp, PlacesEverySampleOnceWithinMemory) {
  const TestCosts costs;
  for (const int ranks : {1, 2, 6, 8, 32}) {
    const auto options = options_of(ranks);
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      auto lengths = long_tailed_lengths(static_cast<std::size_t>(5 * ranks), seed);
      const auto powers = powers_of_two(options);
      for (auto& n : lengths) n = std::min(n, options.micro_batch_tokens * powers.back().ranks);
      lengths.push_back(0);
      const auto samples = samples_of(lengths);
      const Placement placed = flexsp_placement(samples, options, costs);
      expect_sound(placed, samples, options);
      EXPECT_EQ(flexsp_placement(samples, options, costs).step_s, placed.step_s);
    }
  }
  EXPECT_TRUE(flexsp_placement({}, options_of(4), costs).micro_batches.empty());
  EXPECT_THROW(flexsp_placement(samples_of({70000}), options_of(4), costs), Error);
}

TEST(FlexSp, GroupsOfDifferentSizeStandSideBySide) {
  std::vector<std::int64_t> lengths{100000, 40000};
  lengths.insert(lengths.end(), 60, 3000);
  const Placement placed = flexsp_placement(samples_of(lengths), options_of(32), TestCosts());
  std::map<int, int> sizes;
  for (const PlacedMicroBatch& m : placed.micro_batches) ++sizes[m.split.ranks];
  EXPECT_GE(sizes.size(), 2u);
  EXPECT_LT(placed.step_s, 1.3 * placed.bound_s);
}

TEST(FlexSp, BucketsLoseFewestTokens) {
  const std::vector<std::int64_t> lengths{7, 1, 2, 9, 9, 30, 31, 2, 100};
  const auto lost = [&](const std::vector<std::int64_t>& ends) {
    std::int64_t sum = 0;
    for (const std::int64_t n : lengths) sum += *std::lower_bound(ends.begin(), ends.end(), n) - n;
    return sum;
  };
  const std::vector<std::int64_t> distinct{1, 2, 7, 9, 30, 31, 100};
  for (int count = 1; count <= 8; ++count) {
    const auto found = length_buckets(lengths, count);
    EXPECT_LE(static_cast<int>(found.size()), count);
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (unsigned chosen = 0; chosen < 64; ++chosen) {  // of all but the last, which must be one
      std::vector<std::int64_t> ends;
      for (std::size_t i = 0; i < 6; ++i)
        if (chosen >> i & 1) ends.push_back(distinct[i]);
      ends.push_back(100);
      if (static_cast<int>(ends.size()) <= count) least = std::min(least, lost(ends));
    }
    EXPECT_EQ(lost(found), least) << count;
  }
  EXPECT_TRUE(length_buckets({}, 4).empty());
}

/// Every choice of numbers of groups that fills the ranks.
double least_of_all(const std::vector<std::int64_t>& lengths,
                    const std::vector<PlacementSplit>& splits, const PlacementOptions& options) {
  const TestCosts costs;
  double least = std::numeric_limits<double>::infinity();
  std::vector<int> counts(splits.size(), 0);
  const std::function<void(std::size_t, int)> fill = [&](std::size_t s, int left) {
    if (s == 0) {
      counts[0] = left;
      least = std::min(least, assign_groups(lengths, counts, splits, options, costs).longest_s);
      return;
    }
    for (counts[s] = 0; counts[s] * splits[s].ranks <= left; ++counts[s])
      fill(s - 1, left - counts[s] * splits[s].ranks);
    counts[s] = 0;
  };
  fill(splits.size() - 1, options.ranks);
  return least;
}

TEST(FlexSpSlow, TheSearchFindsWhatTryingAllGroupsFinds) {
  double worst = 1, sum = 0;
  int tried = 0;
  for (const int ranks : {8, 16, 32}) {
    PlacementOptions options = options_of(ranks);
    options.micro_batch_tokens = options.memory_bytes = 131072 * 8 / ranks;
    const auto splits = powers_of_two(options);
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      auto lengths = long_tailed_lengths(static_cast<std::size_t>(6 * ranks), seed);
      std::sort(lengths.rbegin(), lengths.rend());
      const double least = least_of_all(lengths, splits, options);
      const double found = choose_groups(lengths, splits, options, TestCosts()).longest_s;
      EXPECT_GE(found, least * (1 - 1e-9));
      worst = std::max(worst, found / least), sum += found / least, ++tried;
    }
  }
  EXPECT_LE(worst, 1.03);
  EXPECT_LE(sum / tried, 1.01);
}

}  // namespace
}  // namespace ballast
