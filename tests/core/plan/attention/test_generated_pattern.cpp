// Generated patterns: work against a pair-by-pair count, density, determinism, and balance over
// layouts.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

TEST(GeneratedIndex, WorkCountsEveryPairOnce) {
  const unsigned seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 20 && !::testing::Test::HasFailure(); ++trial) {
    GeneratedPattern p;
    p.tokens = kBlock * static_cast<std::int64_t>(2 + random() % 7);
    p.heads = 1 + static_cast<int>(random() % 3);
    p.density = 0.1 + 0.1 * static_cast<double>(random() % 9);
    p.band_tokens = 1 + static_cast<std::int64_t>(random() % 100);
    p.columns = static_cast<std::int64_t>(random() % 40);
    p.seed = random();
    const auto heads = generate(p);
    std::map<std::pair<std::int64_t, std::int64_t>, double> expected, got;
    double total = 0;
    for (const GeneratedHead& head : heads) {
      const std::set<std::int32_t> slashes(head.slashes.begin(), head.slashes.end());
      const std::set<std::int64_t> columns(head.columns.begin(), head.columns.end());
      EXPECT_EQ(columns.size(), static_cast<std::size_t>(p.columns));
      EXPECT_EQ(slashes.count(0), 1u);
      for (std::int64_t q = 0; q < p.tokens; ++q)
        for (std::int64_t k = 0; k <= q; ++k) {
          const std::int64_t i = q / kBlock, j = k / kBlock;
          if (slashes.count(static_cast<std::int32_t>(i - j)) == 0 && columns.count(k) == 0)
            continue;
          expected[{i, j}] += 1;
          total += 1;
        }
    }
    for_each_work(heads, p.tokens, [&](std::int64_t i, std::int64_t j, double pairs) {
      if (pairs > 0) got[{i, j}] += pairs;
    });
    EXPECT_EQ(got, expected);
    EXPECT_NEAR(
        density(heads, p.tokens) * 0.5 * static_cast<double>(p.tokens * (p.tokens + 1)) * p.heads,
        total, 1e-6 * total);
    // The ring computes the same work, whatever the layout.
    for (const auto& owner :
         {block_owners(SequenceLayout(LayoutKind::striped, p.tokens, 4, 64, 64)),
          block_owners(SequenceLayout(LayoutKind::shuffled, p.tokens, 4, 64, 64))}) {
      double sum = 0;
      for (const auto& worker : ring_work(heads, owner, 2, 2))
        for (double w : worker) sum += w;
      EXPECT_NEAR(sum, total, 1e-6 * total);
    }
  }
}

TEST(GeneratedIndex, DensityIsMetAndHeadsDependOnTheSeedAlone) {
  GeneratedPattern p{65536, 4, 0.05, 1024, 256, 3};
  const auto heads = generate(p);
  EXPECT_NEAR(density(heads, p.tokens), 0.05, 0.002);
  p.heads = 2;
  const auto fewer = generate(p);
  EXPECT_EQ(fewer[1].slashes, heads[1].slashes);
  EXPECT_EQ(fewer[1].columns, heads[1].columns);
  EXPECT_NE(heads[0].slashes, heads[1].slashes);
  p.density = 1;
  EXPECT_DOUBLE_EQ(density(generate(p), p.tokens), 1.0);
  EXPECT_DOUBLE_EQ(density({dense_head(p.tokens)}, p.tokens), 1.0);
}

TEST(GeneratedIndex, StripesBalanceWhatZigzagDoesNot) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const GeneratedPattern p{131072, 8, 0.05, 1024, 512, seed};
    const auto heads = generate(p);
    const auto balance = [&](const std::vector<int>& owner) {
      return ring_balance(ring_work(heads, owner, 2, 4), 2, 4);
    };
    const RingBalance striped =
        balance(block_owners(SequenceLayout(LayoutKind::striped, p.tokens, 8, 64, 64)));
    const RingBalance zigzag =
        balance(block_owners(SequenceLayout(LayoutKind::zigzag, p.tokens, 8, 64, 64)));
    const RingBalance shuffled =
        balance(block_owners(SequenceLayout(LayoutKind::shuffled, p.tokens, 8, 64, 64)));
    EXPECT_LT(striped.worker_imbalance, 1.10);
    EXPECT_GT(zigzag.worker_imbalance, 1.3);
    EXPECT_LT(shuffled.worker_imbalance, 1.05);
    EXPECT_LT(shuffled.step_imbalance, 1.05);
    for (const RingBalance& b : {striped, zigzag, shuffled}) {
      EXPECT_GE(b.critical_path, 1.0 - 1e-12);
      EXPECT_GE(b.lockstep_path, b.critical_path - 1e-12);
    }
  }
}

TEST(GeneratedIndex, BadInput) {
  EXPECT_THROW(generate({100, 1, 0.5, 64, 0, 0}), Error);
  EXPECT_THROW(generate({128, 0, 0.5, 64, 0, 0}), Error);
  EXPECT_THROW(generate({128, 1, 0.0, 64, 0, 0}), Error);
  EXPECT_THROW(generate({128, 1, 1.5, 64, 0, 0}), Error);
  EXPECT_THROW(generate({128, 1, 0.5, 64, 129, 0}), Error);
  EXPECT_THROW(block_owners(SequenceLayout(LayoutKind::striped, 256, 2, 1)), Error);
}

}  // namespace
}  // namespace ballast
