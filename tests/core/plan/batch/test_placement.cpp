// Placement: groups of different size side by side, by time.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/batch/placement.hpp"
#include "tests/core/plan/batch/long_tailed_lengths.hpp"
#include "tests/core/plan/batch/placement_splits.hpp"

namespace ballast {
namespace {

PlacementOptions options_of(int ranks, double memory_tokens = 0) {
  PlacementOptions o;
  o.ranks = ranks;
  o.splits = placement_splits(ranks, 24, 24);
  o.micro_batch_tokens = 16384;
  o.memory_bytes = memory_tokens;
  return o;
}

std::vector<SampleLength> placed_samples(const std::vector<std::int64_t>& lengths) {
  std::vector<SampleLength> samples;
  for (const std::int64_t n : lengths)
    samples.push_back({static_cast<std::int64_t>(samples.size()) * 3 + 1, n, n > 0 ? n - 1 : 0});
  return samples;
}

/// Every stage goes through the micro-batches behind the one before it; where neighbours of a list
/// differ, each later stage waits for half of that.
double step_seconds(const Placement& p, int stages) {
  std::vector<double> ready(p.micro_batches.size(), 0.0);
  std::vector<double> clock(p.ranks.size());
  for (int stage = 0; stage < stages; ++stage) {
    clock.assign(clock.size(), 0.0);
    for (std::size_t m = 0; m < ready.size(); ++m) {
      const auto first = clock.begin() + p.micro_batches[m].first,
                 last = first + p.micro_batches[m].split.ranks;
      ready[m] = std::max(ready[m], *std::max_element(first, last)) + p.micro_batches[m].seconds;
      std::fill(first, last, ready[m]);
    }
  }
  double all = 0;
  for (std::size_t r = 0; r < clock.size(); ++r) {
    double differences = 0, before = -1;
    for (const int id : p.ranks[r]) {
      const double now = p.micro_batches[static_cast<std::size_t>(id)].seconds;
      if (before >= 0) differences += std::abs(now - before);
      before = now;
    }
    all = std::max(all, clock[r] + (stages - 1) * 0.5 * differences);
  }
  return all;
}

/// Every sample once, whole or in chunks one after another on one group; lists in the common order;
/// memory respected; and the time of the step by a clock of its own.
void expect_sound(const std::vector<SampleLength>& samples, const PlacementOptions& o,
                  const PlacementCosts& costs, const Placement& p) {
  struct Seen {
    std::int64_t end = 0, loss = 0;
    int first = -1, pieces = 0;
  };
  std::map<std::int64_t, Seen> seen;
  std::vector<double> clock(static_cast<std::size_t>(o.ranks), 0.0);
  std::vector<std::vector<int>> lists(clock.size());
  for (std::size_t m = 0; m < p.micro_batches.size(); ++m) {
    const PlacedMicroBatch& mb = p.micro_batches[m];
    ASSERT_FALSE(mb.segments.empty());
    ASSERT_GE(mb.first, 0);
    ASSERT_LE(mb.first + mb.split.ranks, o.ranks);
    ASSERT_EQ(mb.first % (o.aligned ? mb.split.ranks : mb.split.ranks & -mb.split.ranks), 0);
    std::int64_t tokens = 0, prefix = 0;
    for (const Segment& s : mb.segments) {
      Seen& at = seen[s.sample];
      ASSERT_EQ(s.begin, at.end) << "sample " << s.sample;
      if (s.begin > 0) {
        ASSERT_EQ(s.begin % std::lcm(o.align, o.chunk_align), 0)
            << "a chunk of sample " << s.sample;
        ASSERT_EQ(mb.segments.size(), 1u);
        ASSERT_EQ(at.first, mb.first);
      }
      at = {s.end, at.loss + s.loss_tokens, mb.first, at.pieces + 1};
      tokens += (s.tokens() + o.align - 1) / o.align * o.align;
      prefix = s.begin;
    }
    ASSERT_TRUE(o.memory_bytes <= 0 || costs.bytes(tokens, prefix, mb.split) <= o.memory_bytes);
    ASSERT_TRUE(mb.segments.size() == 1 || tokens <= o.micro_batch_tokens);
    double start = 0;
    for (int r = mb.first; r < mb.first + mb.split.ranks; ++r) {
      start = std::max(start, clock[static_cast<std::size_t>(r)]);
      lists[static_cast<std::size_t>(r)].push_back(static_cast<int>(m));
    }
    for (int r = mb.first; r < mb.first + mb.split.ranks; ++r)
      clock[static_cast<std::size_t>(r)] = start + mb.seconds;
  }
  ASSERT_EQ(p.ranks, lists);
  ASSERT_EQ(seen.size(), samples.size());
  for (const SampleLength& s : samples) {
    ASSERT_EQ(seen[s.sample].end, s.tokens);
    ASSERT_EQ(seen[s.sample].loss, s.loss_tokens);
    ASSERT_TRUE(s.tokens > 0 || seen[s.sample].pieces == 1);
  }
  ASSERT_NEAR(p.step_s, step_seconds(p, o.stages), 1e-9 * p.step_s);
}

TEST(Placement, RandomStepsAreSound) {
  const TestCosts costs;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const auto draw = [&](std::uint64_t i, int n) {
      return static_cast<int>(random_bits(seed, 1, i) % static_cast<std::uint64_t>(n));
    };
    const int ranks = 1 + draw(0, 24);
    PlacementOptions o = options_of(ranks, draw(1, 2) == 0 ? 0 : 6000);
    o.aligned = draw(2, 3) == 0;
    o.stages = 1 + draw(3, 4);
    o.chunk_align = std::int64_t{1} << draw(40, 3) * 4;  // 1, 16 or 256
    o.align = draw(4, 2) == 0 ? 1 : 64;
    o.micro_batch_tokens = 1 + draw(5, 20000);
    o.chunk_k = 1 + draw(6, 3);
    std::vector<std::int64_t> lengths = long_tailed_lengths(static_cast<std::size_t>(draw(7, 90)));
    for (std::size_t i = 0; i < lengths.size(); ++i)
      if (draw(100 + i, 11) == 0) lengths[i] = 0;
    const auto samples = placed_samples(lengths);
    const Placement p = place(samples, o, costs);
    SCOPED_TRACE(fmt::format("seed {}, {} ranks, {} samples", seed, ranks, lengths.size()));
    expect_sound(samples, o, costs, p);
    if (HasFatalFailure()) return;
  }
}

TEST(Placement, TheOrderOfSamplesDoesNotMatter) {
  const TestCosts costs;
  std::vector<SampleLength> samples = placed_samples(long_tailed_lengths(200));
  std::sort(samples.begin(), samples.end(),
            [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
  samples.erase(std::unique(samples.begin(), samples.end(),
                            [](const auto& a, const auto& b) { return a.tokens == b.tokens; }),
                samples.end());
  const PlacementOptions o = options_of(8, 16384);
  const Placement a = place(samples, o, costs);
  std::reverse(samples.begin(), samples.end());
  const Placement b = place(samples, o, costs);
  EXPECT_EQ(a.ranks, b.ranks);
  for (std::size_t m = 0; m < a.micro_batches.size(); ++m)
    EXPECT_EQ(a.micro_batches[m].segments, b.micro_batches[m].segments);
}

TEST(Placement, OneSampleTakesAllRanks) {
  const TestCosts costs;
  const Placement p = place(placed_samples({100000}), options_of(8), costs);
  ASSERT_EQ(p.micro_batches.size(), 1u);
  EXPECT_EQ(p.micro_batches[0].split.ranks, 8);
  EXPECT_EQ(p.idle_ranks(), 0);
}

TEST(Placement, FewerSamplesThanRanksShareThem) {
  const TestCosts costs;
  const Placement equal = place(placed_samples({9000, 9000, 9000, 9000}), options_of(8), costs);
  ASSERT_EQ(equal.micro_batches.size(), 4u);
  for (const auto& m : equal.micro_batches) EXPECT_EQ(m.split.ranks, 2);
  EXPECT_EQ(equal.idle_ranks(), 0);
  // Without a gain from sharing, ranks are left idle rather than slowed down.
  TestCosts dear;
  dear.exchange_token_s = 1;
  const Placement alone = place(placed_samples({9000, 9000, 9000, 9000}), options_of(8), dear);
  for (const auto& m : alone.micro_batches) EXPECT_EQ(m.split.ranks, 1);
  EXPECT_EQ(alone.idle_ranks(), 4);
}

TEST(Placement, EqualSamplesSpreadEvenly) {
  const TestCosts costs;
  const Placement p =
      place(placed_samples(std::vector<std::int64_t>(64, 3000)), options_of(8), costs);
  for (const auto& list : p.ranks) {
    std::size_t samples = 0;
    for (const int m : list)
      samples += p.micro_batches[static_cast<std::size_t>(m)].segments.size();
    EXPECT_EQ(samples, 8u);
  }
  EXPECT_NEAR(p.step_s, p.bound_s, 1e-9);
}

TEST(Placement, NothingAndEmptySamples) {
  const TestCosts costs;
  EXPECT_EQ(place({}, options_of(4), costs).step_s, 0);
  EXPECT_EQ(place({}, options_of(4), costs).idle_ranks(), 4);
  const Placement p = place(placed_samples({0, 0, 0}), options_of(4), costs);
  EXPECT_EQ(p.step_s, 0);
  expect_sound(placed_samples({0, 0, 0}), options_of(4), costs, p);
}

TEST(Placement, SizesThatAreNoPowersOfTwo) {
  // 3 ranks: 3 samples of one third each would take 1 rank; one of three thirds takes all three.
  const TestCosts costs;
  const Placement three = place(placed_samples({60000}), options_of(3), costs);
  EXPECT_EQ(three.micro_batches[0].split.ranks, 3);
  EXPECT_EQ(three.micro_batches[0].split.sp, 3);
  // 6 ranks beside 2: two samples whose work is as 3 to 1.
  TestCosts linear;
  linear.pair_s = 0;
  PlacementOptions o = options_of(8);
  o.splits = {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {6, 3, 2}};
  const Placement side = place(placed_samples({60000, 20000}), o, linear);
  std::multiset<int> sizes;
  for (const auto& m : side.micro_batches) sizes.insert(m.split.ranks);
  EXPECT_EQ(sizes, (std::multiset<int>{2, 6}));
}

TEST(Placement, MemoryDecidesTheFewestRanks) {
  const TestCosts costs;  // a byte a token
  std::vector<std::int64_t> lengths{32000};
  for (int i = 0; i < 400; ++i) lengths.push_back(2000);
  const Placement p = place(placed_samples(lengths), options_of(8, 8192), costs);
  expect_sound(placed_samples(lengths), options_of(8, 8192), costs, p);
  for (const auto& m : p.micro_batches)
    EXPECT_EQ(m.split.ranks, m.segments[0].tokens() == 32000 ? 4 : 1);
}

TEST(Placement, ASampleThatNoGroupHoldsRunsInChunksInsideOne) {
  TestCosts costs;
  const auto samples = placed_samples({100000, 500, 700});
  PlacementOptions o = options_of(4, 8192);
  const Placement p = place(samples, o, costs);
  expect_sound(samples, o, costs, p);
  int chunks = 0;
  for (const auto& m : p.micro_batches)
    chunks += m.segments[0].begin > 0 || m.segments[0].end < 100000 ? 1 : 0;
  EXPECT_GE(chunks, 4);
  costs.prefix_bytes = 1;  // the stored keys alone fill every group
  EXPECT_THROW(place(samples, o, costs), Error);
}

TEST(Placement, AFirstForwardOfChunksIsPaidFor) {
  TestCosts costs;
  PlacementOptions o = options_of(1, 1000);
  const auto samples = placed_samples({4000});
  const double twice = place(samples, o, costs).step_s;
  o.forward_share = 0;
  const double once = place(samples, o, costs).step_s;
  EXPECT_GT(twice, 1.15 * once);
  o.forward_share = 1.0 / 3;
  o.chunk_k = 100;
  EXPECT_NEAR(place(samples, o, costs).step_s, once, 1e-12);
}

TEST(Placement, PipelinesGetShorterMicroBatches) {
  const TestCosts costs;
  std::vector<std::int64_t> lengths{40000};
  for (int i = 0; i < 300; ++i) lengths.push_back(3000);
  PlacementOptions o = options_of(8);
  o.micro_batch_tokens = 4096;
  const auto longest = [&] {
    double most = 0;
    for (const auto& m : place(placed_samples(lengths), o, costs).micro_batches)
      most = std::max(most, m.seconds);
    return most;
  };
  const double alone = longest();
  o.stages = 8;
  EXPECT_LT(longest(), 0.6 * alone);
}

TEST(Placement, SparseBudgetsInTheCostChangeTheDegrees) {
  // Attention that sees at most 2,048 keys a query makes a long sample cheap: it needs fewer ranks.
  struct Sparse : TestCosts {
    double attention_s(std::int64_t q, std::int64_t p, const PlacementSplit& s) const override {
      const double n = static_cast<double>(q);
      return std::min(TestCosts::attention_s(q, p, s), pair_s * n * 2048 / (s.sp * s.ring));
    }
  };
  std::vector<std::int64_t> lengths{131072};
  for (int i = 0; i < 1300; ++i) lengths.push_back(250);
  const auto degree = [&](const PlacementCosts& costs) {
    for (const auto& m : place(placed_samples(lengths), options_of(32), costs).micro_batches)
      if (m.segments[0].tokens() == 131072) return m.split.ranks;
    return 0;
  };
  EXPECT_LT(degree(Sparse()), degree(TestCosts()));
}

TEST(Placement, FixedOverheadOfAMicroBatchIsNotPaidBySample) {
  // A micro-batch costs 0.1 s whatever it holds: many short samples still pack on one rank's time.
  struct Fixed : TestCosts {
    double rest_s(std::int64_t tokens, const PlacementSplit& s) const override {
      return tokens == 0 ? 0 : 0.1 + TestCosts::rest_s(tokens, s);
    }
  };
  std::vector<std::int64_t> lengths(1000, 16);
  lengths.push_back(9000);
  const auto p = place(placed_samples(lengths), options_of(4), Fixed());
  EXPECT_LE(p.micro_batches.size(), 10u);
}

TEST(Placement, APipelineGetsShorterAndMoreAlikeMicroBatches) {
  const TestCosts costs;
  const auto samples = placed_samples(long_tailed_lengths(200));
  const auto longest_s = [&](int stages) {
    PlacementOptions o = options_of(8, 16384);
    o.aligned = true, o.stages = stages;
    const Placement p = place(samples, o, costs);
    expect_sound(samples, o, costs, p);
    double most = 0;
    for (const auto& m : p.micro_batches) most = std::max(most, m.seconds);
    // Packs as large as memory allows, each sample as narrow as it may be: what one stage wants.
    o.stages = 1;
    EXPECT_LE(p.step_s, step_seconds(place(samples, o, costs), stages) * (1 + 1e-9));
    return most;
  };
  EXPECT_LT(longest_s(4), 0.75 * longest_s(1));
}

// Larger groups for short samples are tried without those that are no multiples of theirs, but
// never without the largest, which may be the only one that holds a sample.
TEST(Placement, APipelineCutsNothingThatAGroupHolds) {
  PlacementOptions few = options_of(6, 1536);
  few.splits = {{1, 1, 1}, {2, 2, 1}, {3, 1, 3}};
  few.aligned = true, few.micro_batch_tokens = 1536;
  few.stages = 2, few.align = 64, few.chunk_align = 4096;
  TestCosts queries;
  queries.prefix_bytes = 0;
  EXPECT_NO_THROW(place(placed_samples({10000, 300}), few, queries));
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const auto draw = [&](std::uint64_t i, int n) {
      return static_cast<int>(random_bits(seed, 2, i) % static_cast<std::uint64_t>(n));
    };
    TestCosts costs;
    costs.exchange_token_s = draw(0, 2) * 1e-4, costs.hop_token_s = draw(1, 2) * 1e-4;
    PlacementOptions o = options_of(12, 1536);
    o.aligned = true, o.stages = 2 + draw(2, 7), o.micro_batch_tokens = 1536;
    o.align = draw(3, 2) == 0 ? 1 : 64;
    o.splits = {{1, 1, 1}};
    for (const int ranks : {2, 3, 4, 6, 8, 12})
      if (draw(10 + static_cast<std::uint64_t>(ranks), 2) == 0)
        o.splits.push_back({ranks, draw(5, 2) == 0 ? ranks : 1, 1}),
            o.splits.back().ring = ranks / o.splits.back().sp;
    const std::int64_t holds = 1536 * o.splits.back().ranks / 64 * 64;
    std::vector<std::int64_t> lengths{holds, holds - draw(6, 1500)};
    for (int i = draw(7, 8); i > 0; --i) lengths.push_back(50 + draw(20 + i, 1400));
    const auto samples = placed_samples(lengths);
    SCOPED_TRACE(fmt::format("seed {}, groups of up to {} ranks", seed, o.splits.back().ranks));
    for (const auto& m : place(samples, o, costs).micro_batches)
      for (const Segment& s : m.segments)
        ASSERT_EQ(s.tokens(), samples[static_cast<std::size_t>(s.sample / 3)].tokens);
  }
}

TEST(Placement, WrongOptionsAreRefused) {
  const auto refused = [](auto change) {
    PlacementOptions o = options_of(4);
    change(o);
    EXPECT_FALSE(problems(o).empty());
    EXPECT_THROW(place({}, o, TestCosts()), Error);
  };
  refused([](auto& o) { o.ranks = 0; });
  refused([](auto& o) { o.splits.clear(); });
  refused([](auto& o) { o.splits = {{2, 2, 1}, {1, 1, 1}}; });
  refused([](auto& o) { o.splits = {{3, 3, 1}}; });
  refused([](auto& o) { o.micro_batch_tokens = 0; });
  refused([](auto& o) { o.stages = 0; });
  EXPECT_THROW(place({{0, -1, 0}}, options_of(4), TestCosts()), Error);
}

TEST(Placement, AThousandRanksArePlannedInMilliseconds) {
  PlacementOptions o = options_of(1024, 16384);
  const auto samples = placed_samples(long_tailed_lengths(5600));
  const auto begin = std::chrono::steady_clock::now();
  const Placement p = place(samples, o, TestCosts());
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_LT(p.step_s, 1.06 * p.bound_s);
  EXPECT_LT(seconds, 1.0);  // 0.05 s alone on a core; test machines are shared
}

}  // namespace
}  // namespace ballast
