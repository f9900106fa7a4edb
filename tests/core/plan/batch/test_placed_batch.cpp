// Placement as lists of rounds: ranks that share a micro-batch have it at the same place.
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "core/base/error.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/batch/placed_batch.hpp"
#include "tests/core/plan/batch/long_tailed_lengths.hpp"

namespace ballast {
namespace {

BatchingOptions packed_options(int dp) {
  BatchingOptions o;
  o.method = Batching::balanced;
  o.dp = dp;
  o.micro_batch_tokens = 16384;
  o.splits.clear();
  for (int ranks = 1; ranks <= dp; ++ranks)
    if (dp % ranks == 0 && 24 % ranks == 0) o.splits.push_back({ranks, ranks, 1});
  o.placement_costs = std::make_shared<TestCosts>();
  return o;
}

TEST(PlacedBatch, PlacementIsToldAllThatTheDeckSays) {
  BatchingOptions o = packed_options(6);
  o.stages = 3, o.align = 64, o.chunk_align = 512, o.chunk_k = 5, o.micro_batch_tokens = 1000;
  const PlacementOptions placement = placement_options(o);
  EXPECT_EQ(placement.ranks, 6);
  EXPECT_EQ(placement.stages, 3);
  EXPECT_EQ(placement.align, 64);
  EXPECT_EQ(placement.chunk_align, 512);
  EXPECT_EQ(placement.chunk_k, 5);
  EXPECT_EQ(placement.micro_batch_tokens, 1000);
  EXPECT_EQ(placement.memory_bytes, 1000);
  EXPECT_EQ(placement.splits.size(), o.splits.size());
  // A choice for a stretch of queries is made once, so chunks begin where stretches do.
  o = packed_options(4);
  o.align = 64, o.chunk_align = 512;
  std::size_t chunks = 0;
  for (const auto& list : plan_batch(0, {{0, 300000, 1}}, o).micro_batches)
    for (const MicroBatch& m : list)
      for (const Segment& s : m.segments) {
        EXPECT_EQ(s.begin % 512, 0);
        chunks += s.begin > 0;
      }
  EXPECT_GT(chunks, 0u);
}

TEST(PlacedBatch, SharedMicroBatchesStandAtOnePlaceAndEveryTokenOnce) {
  std::size_t all_shared = 0;
  for (const int dp : {1, 2, 6, 12, 32}) {
    const auto lengths = long_tailed_lengths(300, static_cast<std::uint64_t>(dp));
    std::vector<SampleLength> samples;
    for (std::size_t i = 0; i < lengths.size(); ++i)
      samples.push_back({static_cast<std::int64_t>(i), lengths[i], lengths[i] - 1});
    const BatchingOptions o = packed_options(dp);
    const Batch batch = plan_batch(5, samples, o);
    ASSERT_EQ(batch.step, 5);
    ASSERT_EQ(batch.micro_batches.size(), static_cast<std::size_t>(dp));
    std::map<std::int64_t, std::int64_t> tokens;
    std::size_t shared = 0;
    for (int d = 0; d < dp; ++d) {
      const auto& list = batch.micro_batches[static_cast<std::size_t>(d)];
      ASSERT_EQ(list.size(), batch.micro_batches[0].size());
      std::vector<MicroBatch> work = list;  // with what the first of its neighbours holds
      for (std::size_t m = 0; m < work.size(); ++m)
        work[m] = batch.micro_batches[static_cast<std::size_t>(d - d % list[m].sp)][m];
      EXPECT_NO_THROW(chunk_groups(work));
      for (std::size_t m = 0; m < list.size(); ++m) {
        const auto& first = batch.micro_batches[static_cast<std::size_t>(d - d % list[m].sp)][m];
        ASSERT_EQ(first.sp, list[m].sp);
        ASSERT_TRUE(d % list[m].sp == 0 || list[m].segments.empty());
        ASSERT_LE(list[m].tokens(), o.micro_batch_tokens * list[m].sp);
        shared += !list[m].segments.empty() && list[m].sp > 1;
        for (const Segment& s : list[m].segments) tokens[s.sample] += s.tokens();
      }
    }
    EXPECT_TRUE(dp > 1 || shared == 0);
    all_shared += shared;
    ASSERT_EQ(tokens.size(), samples.size());
    for (const SampleLength& s : samples) EXPECT_EQ(tokens[s.sample], s.tokens);
    EXPECT_EQ(plan_batch(5, samples, o).micro_batches, batch.micro_batches);
  }
  EXPECT_GT(all_shared, 0u);
}

TEST(PlacedBatch, NeedsCosts) {
  BatchingOptions o = packed_options(2);
  o.placement_costs = nullptr;
  EXPECT_THROW(plan_batch(0, {{0, 10, 9}}, o), Error);
}

}  // namespace
}  // namespace ballast
