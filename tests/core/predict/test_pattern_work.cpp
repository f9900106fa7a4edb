// What the clock takes a sparse pattern for, against its pairs one by one.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/predict/pattern_work.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

GeneratedPattern drawn(std::mt19937_64& random) {
  GeneratedPattern pattern;
  pattern.heads = 1 + static_cast<int>(random() % 3);
  pattern.density = 0.02 + 0.2 * static_cast<double>(random() % 100) / 100;
  pattern.band_tokens = 64 + static_cast<std::int64_t>(random() % 200);
  pattern.columns = static_cast<std::int64_t>(random() % 200);
  pattern.seed = random();
  return pattern;
}

PatternWork pattern_work_of(const GeneratedPattern& pattern) {
  return PatternWork([pattern](std::int64_t tokens) { return generated_heads(pattern, tokens); });
}

/// Keys that query `q` computes under one head.
std::int64_t keys_of(const GeneratedHead& head, std::int64_t q) {
  const std::set<std::int64_t> columns(head.columns.begin(), head.columns.end());
  const std::set<std::int64_t> slashes(head.slashes.begin(), head.slashes.end());
  std::int64_t count = 0;
  for (std::int64_t k = 0; k <= q; ++k)
    count += slashes.count(q / kBlock - k / kBlock) > 0 ||
             (columns.count(k) > 0 && k / kBlock < q / kBlock);
  return count;
}

TEST(PatternWorkSlow, SharesOfVisiblePairs) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 3; ++round) {
    const GeneratedPattern pattern = drawn(random);
    constexpr std::int64_t kTokens = 2048;  // a power of two: lengths like it are it
    double computed = 0;
    const auto heads = generated_heads(pattern, kTokens);
    for (const GeneratedHead& head : heads)
      for (std::int64_t q = 0; q < kTokens; ++q) computed += static_cast<double>(keys_of(head, q));
    const double visible = 0.5 * kTokens * (kTokens + 1) * static_cast<double>(heads.size());
    EXPECT_NEAR(pattern_work_of(pattern).density(kTokens), computed / visible, 1e-9);
  }
  EXPECT_EQ(PatternWork(0.3).density(12345), 0.3);
  EXPECT_EQ(pattern_work_of({}).density(1), 1) << "one block is dense";
}

/// The busiest rank of a ring without waiting, from owners of single tokens.
TEST(PatternWork, LiesOnARingAsItsLayoutDealsIt) {
  std::mt19937_64 random(test_seed());
  for (const LayoutKind kind : {LayoutKind::zigzag, LayoutKind::striped, LayoutKind::contiguous})
    for (int round = 0; round < 2; ++round) {
      const GeneratedPattern pattern = drawn(random);
      MicroBatch m;
      m.align = kBlock;
      std::int64_t tokens = 0;
      for (int s = 0; s < 1 + round % 2; ++s) {
        const std::int64_t n = kBlock * (8 + static_cast<std::int64_t>(random() % 16));
        m.segments.push_back({s, 0, n, 0});
        tokens += n;
      }
      const SequenceLayout layout(kind, tokens, 4, kBlock, kBlock);
      std::vector<double> rank(4, 0);
      const std::vector<int> owner = block_owners(layout);
      std::int64_t first = 0;
      for (const Segment& s : m.segments) {
        for (const GeneratedHead& head : generated_heads(pattern, s.end))
          for (std::int64_t q = 0; q < s.end; ++q)
            rank[static_cast<std::size_t>(owner[static_cast<std::size_t>((first + q) / kBlock)])] +=
                static_cast<double>(keys_of(head, q));
        first += s.end;
      }
      double sum = 0, most = 0;
      for (const double r : rank) sum += r, most = std::max(most, r);
      // Nobody ends before the busiest rank has computed, and waiting adds at most a step a hop.
      for (const auto& [outer, inner] : {std::pair{1, 4}, {2, 2}}) {
        const double found = pattern_work_of(pattern).uneven(m, layout, outer, inner);
        EXPECT_GE(found, most * 4 / sum * (1 - 1e-9)) << name(kind);
        EXPECT_LE(found, 4.0) << name(kind);
        if (m.segments.size() > 1) continue;
        const auto work = ring_work(generated_heads(pattern, tokens), owner, outer, inner);
        EXPECT_NEAR(found, std::max(1.0, ring_balance(work, outer, inner).critical_path), 1e-9);
      }
      EXPECT_EQ(PatternWork(0.3).uneven(m, layout, 1, 4), 1);
      m.segments.front().begin = kBlock;
      EXPECT_EQ(pattern_work_of(pattern).uneven(m, layout, 1, 4), 1) << "a chunk after stored keys";
    }
}

}  // namespace
}  // namespace ballast
