// Rings whose size follows a sample's length.
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "core/plan/batch/rivals/dynamic_cp.hpp"
#include "tests/core/plan/batch/rivals/placements.hpp"

namespace ballast {
namespace {

TEST(DynamicCp, LengthAloneDecidesHowManyRanksShareASample) {
  const TestCosts costs;
  const auto options = options_of(32);
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const auto samples = samples_of(long_tailed_lengths(400, seed));
    const Placement placed = dynamic_cp_placement(samples, options, costs);
    expect_sound(placed, samples, options);
    for (const PlacedMicroBatch& m : placed.micro_batches) {
      EXPECT_EQ(m.split.sp, 1);
      if (m.split.ranks == 1) continue;
      ASSERT_EQ(m.segments.size(), 1u);
      EXPECT_GT(m.segments[0].tokens(), 16384 * m.split.ranks / 2);
    }
  }
}

TEST(DynamicCp, IdleRanksJoinTheLongestSample) {
  const TestCosts costs;
  const auto placed = dynamic_cp_placement(samples_of({16000, 16000}), options_of(8), costs);
  EXPECT_EQ(placed.idle_ranks(), 0);
  for (const PlacedMicroBatch& m : placed.micro_batches) EXPECT_EQ(m.split.ranks, 4);
  // One sample that takes every rank it can.
  EXPECT_EQ(dynamic_cp_placement(samples_of({100000}), options_of(16), costs).idle_ranks(), 0);
  EXPECT_THROW(dynamic_cp_placement(samples_of({40000}), options_of(2), costs), Error);
  EXPECT_TRUE(dynamic_cp_placement({}, options_of(2), costs).micro_batches.empty());
}

}  // namespace
}  // namespace ballast
