// Attention patterns: visible intervals, counts and cover words against pair-by-pair
// definitions.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/axis_shards.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

MicroBatch random_batch(std::mt19937_64& random, bool prefixed) {
  MicroBatch batch;
  const int segments = 1 + static_cast<int>(random() % 5);
  for (int s = 0; s < segments; ++s) {
    const std::int64_t lengths[] = {0, 1, static_cast<std::int64_t>(random() % 10),
                                    static_cast<std::int64_t>(random() % 200)};
    const std::int64_t begin = prefixed ? static_cast<std::int64_t>(random() % 100) : 0;
    batch.segments.push_back({s, begin, begin + lengths[random() % 4], 0});
  }
  return batch;
}

TEST(AttentionPattern, IntervalsOfEveryLayoutMatchBruteForce) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 60; ++trial) {
    const MicroBatch batch = random_batch(random, trial % 2);
    for (auto kind :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::shuffled}) {
      const int ranks = 1 + static_cast<int>(random() % 5);
      const std::int64_t stripes[] = {1, 3, 64};
      const SequenceLayout layout(kind, batch.tokens(), ranks, stripes[random() % 3]);
      double pairs = 0;
      for (int me = 0; me < ranks; ++me) {
        const auto queries = local_tokens(batch, layout, me);
        for (int other = 0; other < ranks; ++other) {
          const auto keys = local_tokens(batch, layout, other);
          const AttentionPattern index = dense_pattern(queries, keys);
          ASSERT_EQ(problems(index), "");
          for (std::size_t i = 0; i < queries.size(); ++i)
            for (std::size_t j = 0; j < keys.size(); ++j) {
              const bool visible =
                  queries[i].segment == keys[j].segment && keys[j].position <= queries[i].position;
              ASSERT_EQ(visible, computed(index, 0, i, j))
                  << name(kind) << " rank " << me << " keys of " << other << " pair " << i << ", "
                  << j;
            }
          ASSERT_EQ(index.pairs_per_head(), index.visible_pairs());
          pairs += index.visible_pairs();
        }
      }
      // A chunk's own keys only: its prefix is not on the packed axis.
      double expected = 0;
      for (const auto& s : batch.segments)
        expected += static_cast<double>(s.tokens() * (s.tokens() + 1)) / 2;
      ASSERT_EQ(pairs, expected);
    }
  }
}

TEST(AttentionPattern, StoredPrefixIsVisible) {
  const MicroBatch batch{{{7, 130, 200, 70}}};
  std::vector<AxisToken> queries, keys;
  for (int p = 130; p < 200; ++p) queries.push_back({0, p});
  for (int p = 0; p < 200; ++p) keys.push_back({0, p});
  const AttentionPattern index = dense_pattern(queries, keys);
  EXPECT_EQ(problems(index), "");
  EXPECT_EQ(index.visible_pairs(), batch.attention_pairs());
  EXPECT_EQ(index.arrays().visible.row(0).end, 131);
  EXPECT_EQ(index.arrays().visible.row(69).end, 200);
}

TEST(AttentionPattern, ShardsThatAreAlikeShareADensePattern) {
  std::mt19937_64 random(test_seed());
  for (int trial = 0; trial < 20; ++trial) {
    const MicroBatch batch = random_batch(random, trial % 2 == 1);
    const std::int64_t tokens = PackedAxis(batch).offset.back();
    const int ranks = 1 + static_cast<int>(random() % 6), rank = static_cast<int>(random() % ranks);
    const SequenceLayout layout(LayoutKind::striped, tokens, ranks, 4);
    const std::vector<AxisRanges> keys = shard_ranges(batch, layout);
    const AxisRanges& queries = keys[static_cast<std::size_t>(rank)];
    const std::vector<AttentionPattern> all = dense_patterns(queries, keys);
    ASSERT_EQ(all.size(), keys.size());
    for (std::size_t s = 0; s < keys.size(); ++s) {
      const AttentionPattern one = dense_pattern(queries, keys[s]);
      EXPECT_EQ(all[s].k_tokens(), one.k_tokens());
      EXPECT_EQ(all[s].arrays().visible.ranges(), one.arrays().visible.ranges());
    }
  }
  // Stripes before this rank's own, its own, and those behind it: three kinds.
  const MicroBatch whole{{{0, 0, 512, 0}}};
  const std::vector<AxisRanges> keys =
      shard_ranges(whole, SequenceLayout(LayoutKind::striped, 512, 8, 16));
  const std::vector<AttentionPattern> all = dense_patterns(keys[3], keys);
  for (std::size_t s = 1; s < all.size(); ++s)
    EXPECT_EQ(&all[s].arrays() == &all[s - 1].arrays(), s != 3 && s != 4) << s;
}

TEST(AttentionPattern, RunsOfADenseIndexAreTight) {
  // Two segments of 64 and 70: the second query block must not run over the first segment's keys.
  const MicroBatch batch{{{0, 0, 64, 0}, {1, 0, 70, 0}}};
  const auto tokens = local_tokens(batch, SequenceLayout(LayoutKind::contiguous, 134, 1), 0);
  const AttentionPattern index = dense_pattern(tokens, tokens);
  for (int block = 0; block < 3; ++block) ASSERT_EQ(index.runs(0, block).size(), 1u);
  EXPECT_EQ(index.runs(0, 1).begin()->first, 1);
  EXPECT_EQ(index.runs(0, 1).begin()->last, 2);
  EXPECT_EQ(index.runs(0, 2).begin()->first, 1);
  EXPECT_EQ(index.runs(0, 2).begin()->last, 3);
}

TEST(AttentionPattern, EmptyAxes) {
  const AxisRanges none;
  const AttentionPattern nothing = dense_pattern(none, none);
  EXPECT_EQ(problems(nothing), "");
  EXPECT_EQ(nothing.pairs_per_head(), 0);
  const AttentionPattern no_keys = dense_pattern(AxisRanges{{0, 0, 2}}, none);
  EXPECT_EQ(problems(no_keys), "");
  EXPECT_EQ(no_keys.visible_pairs(), 0);
  EXPECT_EQ(no_keys.runs(0, 0).size(), 0u);
  EXPECT_EQ(problems(dense_pattern(none, AxisRanges{{0, 0}})), "");
}

TEST(AttentionPattern, DisorderIsRefused) {
  EXPECT_THROW(dense_pattern({{0, 0}}, {{0, 1}, {0, 0}}), Error);
  EXPECT_THROW(dense_pattern({{0, 0}}, {{0, 0}, {1, 0}, {0, 1}}), Error);
  EXPECT_THROW(dense_pattern({{0, 5}, {0, 4}}, {{0, 0}}), Error);
  EXPECT_THROW(dense_pattern({{1, 0}, {0, 0}}, {{0, 0}, {1, 0}}), Error);
}

/// Random visible intervals and a random pattern on them.
PatternArrays random_arrays(std::mt19937_64& random, bool with_masks, bool with_columns) {
  const MicroBatch batch = random_batch(random, false);
  auto tokens = local_tokens(batch, SequenceLayout(LayoutKind::contiguous, batch.tokens(), 1), 0);
  if (with_columns)  // query blocks belong to one segment
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = {0, static_cast<std::int64_t>(i)};
  PatternArrays index;
  index.visible = dense_pattern(tokens, tokens).arrays().visible;
  index.k_tokens = static_cast<std::int64_t>(tokens.size());
  index.index_heads = 1 + static_cast<int>(random() % 3);
  index.run_offset.assign(1, 0);
  for (int h = 0; h < index.index_heads; ++h) {
    for (std::int64_t b = 0; b < index.q_blocks(); ++b) {
      std::int32_t k = 0;
      while (true) {
        const std::int32_t first = k + static_cast<std::int32_t>(random() % 3),
                           last = first + 1 + static_cast<std::int32_t>(random() % 2);
        if (last > index.k_blocks()) break;
        if (with_masks && random() % 2) {
          // Two runs over the same blocks whose rows differ.
          const std::uint64_t mask = random();
          for (std::uint64_t rows : {mask, ~mask & random()}) {
            index.runs.push_back({first, last, static_cast<std::int32_t>(index.row_masks.size())});
            index.row_masks.push_back(rows);
          }
        } else {
          index.runs.push_back({first, last, -1});
        }
        k = last;
      }
      index.run_offset.push_back(static_cast<std::int64_t>(index.runs.size()));
    }
  }
  if (with_columns) {
    index.segments = 2;
    for (std::int64_t b = 0; b < index.q_blocks(); ++b)
      index.block_segment.push_back(static_cast<std::int32_t>(random() % 2));
    index.column_offset.assign(1, 0);
    for (int list = 0; list < index.index_heads * index.segments; ++list) {
      for (std::int32_t j = 0; j < index.k_tokens; ++j)
        if (random() % 3 == 0) index.columns.push_back(j);
      index.column_offset.push_back(static_cast<std::int64_t>(index.columns.size()));
    }
    cover_columns(index);
  }
  return index;
}

TEST(AttentionPattern, CountsMatchBruteForce) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 60; ++trial) {
    const PatternArrays index = random_arrays(random, trial % 3 == 1, trial % 3 == 2);
    ASSERT_EQ(problems(index), "");
    double pairs = 0;
    for (int h = 0; h < index.index_heads; ++h)
      for (std::int64_t i = 0; i < index.q_tokens(); ++i)
        for (std::int64_t j = 0; j < index.k_tokens; ++j) pairs += computed(index, h, i, j);
    ASSERT_NEAR(AttentionPattern(index).pairs_per_head(), pairs / index.index_heads, 1e-9 * pairs);
  }
}

TEST(AttentionPattern, ProblemsAreNamed) {
  std::vector<AxisToken> tokens;
  for (int i = 0; i < 200; ++i) tokens.push_back({0, i});
  const PatternArrays good = listed(dense_pattern(tokens, tokens));
  const auto damaged = [&](auto&& damage) {
    PatternArrays index = good;
    damage(index);
    return problems(index);
  };
  EXPECT_EQ(damaged([](auto&) {}), "");
  // Row 5 of 200 sees keys [begin, end) instead of [0, 6).
  const auto fifth = [](std::int64_t begin, std::int64_t end) {
    return [=](PatternArrays& x) {
      VisibleKeys visible;
      visible.add(5, 0, 1, 1);
      visible.add(1, begin, end, 0);
      visible.add(194, 0, 7, 1);
      x.visible = visible;
    };
  };
  EXPECT_EQ(damaged(fifth(0, 6)), "");
  EXPECT_NE(damaged(fifth(0, 201)), "");
  EXPECT_NE(damaged(fifth(0, 3)), "");
  EXPECT_NE(damaged(fifth(7, 6)), "");
  EXPECT_NE(damaged(fifth(1, 6)), "") << "the next row sees key 0 again";
  EXPECT_NE(damaged([](auto& x) { x.visible.add(57, 0, 200, 0); }), "")
      << "a fifth block without runs";
  EXPECT_NE(damaged([](auto& x) { x.dense = true; }), "") << "and yet runs";
  EXPECT_NE(damaged([](auto& x) { x.run_offset.pop_back(); }), "");
  EXPECT_NE(damaged([](auto& x) { x.run_offset[1] = 3; }), "");
  EXPECT_NE(damaged([](auto& x) { x.runs[0].last = 5; }), "");
  EXPECT_NE(damaged([](auto& x) { x.runs[0].first = 1; }), "");
  EXPECT_NE(damaged([](auto& x) { x.runs[0].row_mask = 0; }), "");
  EXPECT_NE(damaged([](auto& x) { x.index_heads = 0; }), "");
  EXPECT_NE(damaged([](auto& x) { x.index_heads = 2; }), "");
  EXPECT_NE(damaged([](auto& x) { x.runs.push_back(x.runs.back()), ++x.run_offset.back(); }), "");
  EXPECT_NE(damaged([](auto& x) { x.columns = {1, 2}; }), "");
  const auto with_columns = [](auto& x) {
    x.block_segment.assign(x.q_blocks(), 0);
    x.columns = {1, 70, 130};
    x.column_offset = {0, 3};
    cover_columns(x);
  };
  EXPECT_EQ(damaged(with_columns), "");
  EXPECT_NE(damaged([&](auto& x) { with_columns(x), x.columns[1] = 1; }), "");
  EXPECT_NE(damaged([&](auto& x) { with_columns(x), x.columns[2] = 200; }), "");
  EXPECT_NE(damaged([&](auto& x) { with_columns(x), x.cover[1] = 0; }), "");
  EXPECT_NE(damaged([&](auto& x) { with_columns(x), x.block_segment[2] = 1; }), "");
  EXPECT_NE(damaged([&](auto& x) { with_columns(x), x.row_masks.push_back(1); }), "");
}

}  // namespace
}  // namespace ballast
