// Packing baselines: every item once, capacity kept, each method what its name says; sums against
// slow references.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "core/base/error.hpp"
#include "core/plan/batch/packing.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

using Lengths = std::vector<std::int64_t>;
using Packs = std::vector<std::vector<std::uint32_t>>;

Packs packs_of(const Packing& packing) {
  Packs packs;
  for (std::size_t p = 0; p < packing.size(); ++p)
    packs.emplace_back(packing[p].begin(), packing[p].end());
  return packs;
}

std::int64_t tokens_of(std::span<const std::uint32_t> pack, const Lengths& lengths) {
  std::int64_t sum = 0;
  for (const std::uint32_t i : pack) sum += lengths[i];
  return sum;
}

/// Sets of the shapes that break packers: equal lengths, one sample, none, zeros, all longer than
/// the capacity, a long tail.
Lengths lengths_within(std::mt19937_64& rng, std::int64_t capacity) {
  const std::size_t n = rng() % 50;
  const int kind = static_cast<int>(rng() % 6);
  Lengths lengths(kind == 1 ? 1 : n);
  const std::int64_t same =
      1 + static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(capacity));
  for (auto& length : lengths) {
    const auto draw = static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(capacity));
    length = kind == 0   ? same
             : kind == 2 ? draw + capacity + 1
             : kind == 3 ? draw % 3
             : kind == 4 ? draw * draw / capacity * 2
                         : draw;
  }
  return lengths;
}

void expect_partition(const Packing& packing, const Lengths& lengths, std::int64_t capacity,
                      const std::string& what) {
  std::vector<int> seen(lengths.size());
  ASSERT_EQ(packing.first.back(), packing.items.size()) << what;
  for (std::size_t p = 0; p < packing.size(); ++p) {
    EXPECT_FALSE(packing[p].empty()) << what;
    if (packing[p].size() > 1) EXPECT_LE(tokens_of(packing[p], lengths), capacity) << what;
    for (const std::uint32_t i : packing[p]) ++seen.at(i);
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; })) << what;
}

/// First or best fit by search through all packs; `order` as the method visits the items.
Packs slow_fit(const std::vector<std::uint32_t>& order, const Lengths& lengths,
               std::int64_t capacity, bool best) {
  Packs packs;
  for (const std::uint32_t i : order) {
    std::size_t into = packs.size();
    for (std::size_t p = 0; p < packs.size(); ++p) {
      if (tokens_of(packs[p], lengths) + lengths[i] > capacity ||
          lengths[packs[p].front()] > capacity)
        continue;
      if (into == packs.size() ||
          (best && tokens_of(packs[p], lengths) > tokens_of(packs[into], lengths)))
        into = p;
    }
    if (into == packs.size()) packs.emplace_back();
    packs[into].push_back(i);
  }
  return packs;
}

TEST(PackingSlow, EveryItemOnceInEveryMethod) {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 rng(seed);
  for (int trial = 0; trial < 10000; ++trial) {
    const std::int64_t capacity = 1 + static_cast<std::int64_t>(rng() % 300);
    const Lengths lengths = lengths_within(rng, capacity);
    for (const PackMethod method : values_of<PackMethod>()) {
      const std::string what = fmt::format("{}, seed {}, trial {}", method, seed, trial);
      const Packing packing =
          pack_lengths(method, lengths, capacity, static_cast<std::uint64_t>(trial));
      expect_partition(packing, lengths, capacity, what);
      if (trial % 100 == 0)
        EXPECT_EQ(packing.items,
                  pack_lengths(method, lengths, capacity, static_cast<std::uint64_t>(trial)).items)
            << what;
      if (HasFailure()) return;
    }
  }
}

TEST(Packing, FirstAndBestFitAreTheSlowOnes) {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 rng(seed);
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t capacity = 50 + static_cast<std::int64_t>(rng() % 300);
    Lengths lengths(rng() % 60);
    for (auto& length : lengths)
      length = 1 + static_cast<std::int64_t>(rng() % static_cast<std::uint64_t>(capacity + 20));
    std::vector<std::uint32_t> order(lengths.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return lengths[a] > lengths[b]; });
    ASSERT_EQ(longest_first(lengths), order) << "seed " << seed;
    EXPECT_EQ(packs_of(pack_lengths(PackMethod::ffd, lengths, capacity)),
              slow_fit(order, lengths, capacity, false))
        << "seed " << seed << " trial " << trial;
    // Best fit may choose among equally full packs: their fill is what counts.
    const auto fill = [&](const Packs& packs) {
      Lengths tokens;
      for (const auto& pack : packs) tokens.push_back(tokens_of(pack, lengths));
      std::sort(tokens.begin(), tokens.end());
      return tokens;
    };
    EXPECT_EQ(fill(packs_of(pack_lengths(PackMethod::bfd, lengths, capacity))),
              fill(slow_fit(order, lengths, capacity, true)))
        << "seed " << seed << " trial " << trial;
  }
}

TEST(Packing, LongestFirstOfWideNumbers) {
  std::mt19937_64 rng(5);
  Lengths lengths(5000);
  for (auto& length : lengths) length = static_cast<std::int64_t>(rng() >> (24 + rng() % 40));
  const auto order = longest_first(lengths);
  for (std::size_t i = 1; i < order.size(); ++i) {
    ASSERT_GE(lengths[order[i - 1]], lengths[order[i]]);
    if (lengths[order[i - 1]] == lengths[order[i]]) ASSERT_LT(order[i - 1], order[i]);
  }
}

TEST(Packing, ByHand) {
  const Lengths lengths{6, 5, 4, 3, 2};
  EXPECT_EQ(packs_of(pack_lengths(PackMethod::ffd, lengths, 10)), (Packs{{0, 2}, {1, 3, 4}}));
  EXPECT_EQ(packs_of(pack_lengths(PackMethod::spfhp, lengths, 10)),
            (Packs{{0, 3}, {1, 2}, {4}}));  // 4 joins the shorter pack, 3 the other, 2 neither
  EXPECT_EQ(packs_of(pack_lengths(PackMethod::sorted, lengths, 10)),
            (Packs{{0}, {1, 2}, {3, 4}}));  // padded: 6; 5 + 5; 3 + 3
}

TEST(Packing, FitMethodsPadLessThanNextFit) {
  std::mt19937_64 rng(11);
  std::lognormal_distribution<double> draw(6, 1);
  Lengths lengths(20000);
  std::int64_t total = 0;
  for (auto& length : lengths)
    total += length = std::clamp<std::int64_t>(static_cast<std::int64_t>(draw(rng)), 1, 4096);
  const auto padding = [&](PackMethod method) {
    return 1 - static_cast<double>(total) /
                   (4096.0 * static_cast<double>(pack_lengths(method, lengths, 4096, 3).size()));
  };
  const double random = padding(PackMethod::random), isf = padding(PackMethod::isf);
  EXPECT_GT(random, 0.05);
  EXPECT_LT(isf, random / 2);
  for (const PackMethod method :
       {PackMethod::ffs, PackMethod::ffd, PackMethod::bfs, PackMethod::bfd})
    EXPECT_LT(padding(method), 0.01) << method;
}

TEST(Packing, BadArgumentsAreRefused) {
  EXPECT_THROW(pack_lengths(PackMethod::ffd, Lengths{1}, 0), Error);
}

}  // namespace
}  // namespace ballast
