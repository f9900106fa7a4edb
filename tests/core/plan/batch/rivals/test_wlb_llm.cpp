// Packs of equal work on groups of one size.
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/base/error.hpp"
#include "core/plan/batch/rivals/wlb_llm.hpp"
#include "tests/core/plan/batch/rivals/placements.hpp"

namespace ballast {
namespace {

TEST(WlbLlm, PlacesEverySampleOnceOnOneSplit) {
  const TestCosts costs;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const auto samples = samples_of(long_tailed_lengths(170, seed));
    for (const PlacementSplit split :
         {PlacementSplit{8, 8, 1}, PlacementSplit{8, 2, 4}, PlacementSplit{32, 1, 32}}) {
      const auto options = options_of(32);
      const Placement placed = wlb_llm_placement(samples, options, split, costs);
      expect_sound(placed, samples, options);
      for (const PlacedMicroBatch& m : placed.micro_batches) EXPECT_EQ(m.split, split);
    }
  }
}

TEST(WlbLlm, PacksDifferInLengthRatherThanInWork) {
  TestCosts costs;
  costs.pair_s = 4 * costs.token_s / 60000;  // attention of the long document: twice its rest
  std::vector<std::int64_t> lengths{60000};
  lengths.insert(lengths.end(), 240, 500);
  const Placement placed = wlb_llm_placement(samples_of(lengths), options_of(16), {8, 8, 1}, costs);
  ASSERT_EQ(placed.micro_batches.size(), 2u);
  // Three units of work beside two and a bit: no short document joins the long one.
  EXPECT_EQ(placed.micro_batches[0].segments.size(), 1u);
  EXPECT_EQ(placed.micro_batches[1].segments.size(), 240u);
  // With twice as much to do beside it, both packs take the same time.
  lengths.insert(lengths.end(), 20, 4000);
  const Placement even = wlb_llm_placement(samples_of(lengths), options_of(32), {16, 16, 1}, costs);
  ASSERT_EQ(even.micro_batches.size(), 2u);
  EXPECT_NEAR(even.micro_batches[0].seconds / even.micro_batches[1].seconds, 1, 0.02);
  std::int64_t tokens[2] = {0, 0};
  for (std::size_t p = 0; p < 2; ++p)
    for (const Segment& s : even.micro_batches[p].segments) tokens[p] += s.tokens();
  EXPECT_GT(std::abs(tokens[0] - tokens[1]), 20000);
}

TEST(WlbLlm, WhatCannotBeIsRefused) {
  const TestCosts costs;
  EXPECT_THROW(wlb_llm_placement(samples_of({40000}), options_of(8), {2, 2, 1}, costs), Error);
  EXPECT_THROW(wlb_llm_placement(samples_of({4}), options_of(6), {4, 4, 1}, costs), Error);
}

}  // namespace
}  // namespace ballast
