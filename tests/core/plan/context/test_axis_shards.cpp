// Axes of all shards, listed or made when they are asked for.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "core/base/error.hpp"
#include "core/plan/context/axis_shards.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

TEST(AxisShards, MadeWhenAskedForTheyAreThoseOfTheLayout) {
  std::mt19937_64 random(test_seed());
  const auto draw = [&](int below) { return static_cast<int>(random() % below); };
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks = 1 + draw(8);
    MicroBatch batch;
    batch.align = draw(2) == 0 ? 1 : 64;
    for (int s = 0; s <= draw(4); ++s) {
      const std::int64_t begin = draw(3) * 64;
      batch.segments.push_back({s, begin, begin + draw(500), 0});
    }
    const LayoutKind kinds[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped};
    const SequenceLayout layout(kinds[draw(3)], batch.axis_tokens(), ranks, 64);
    const AxisShards made(batch, layout);
    const std::vector<AxisRanges> all = shard_ranges(batch, layout);
    ASSERT_EQ(made.size(), all.size());
    for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(made[r], all[r]) << "shard " << r;
    EXPECT_EQ(made, AxisShards(all));
    std::vector<AxisRanges> other = all;
    append(other.back(), {7, 0, 1});
    EXPECT_FALSE(made == AxisShards(other));
    EXPECT_FALSE(made == AxisShards());
  }
}

TEST(AxisShards, AShardThatIsNotThereIsAnError) {
  const MicroBatch batch{{{0, 0, 128, 0}}};
  const AxisShards made(batch, SequenceLayout(LayoutKind::contiguous, 128, 2)), none;
  EXPECT_THROW(made[2], Error);
  EXPECT_THROW(none[0], Error);
  EXPECT_TRUE(none.empty());
  EXPECT_THROW(AxisShards(batch, SequenceLayout(LayoutKind::contiguous, 64, 2))[0], Error);
}

}  // namespace
}  // namespace ballast
