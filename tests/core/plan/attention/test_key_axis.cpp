// Key axes, and indexes cut into shards: the pairs of the shards together are those of the whole,
// on every layout.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/attention/key_axis.hpp"
#include "core/plan/context/axis_range.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

struct LayoutCase {
  LayoutKind kind;
  std::int64_t stripe;
};
const LayoutCase kLayouts[] = {{LayoutKind::contiguous, 1},
                               {LayoutKind::zigzag, 1},
                               {LayoutKind::striped, 64},
                               {LayoutKind::striped, 128},
                               {LayoutKind::shuffled, 64}};

MicroBatch aligned_batch(std::mt19937_64& random, std::int64_t align) {
  MicroBatch batch;
  batch.align = align;
  for (int s = 0, n = 1 + static_cast<int>(random() % 4); s < n; ++s)
    batch.segments.push_back({s, 0, static_cast<std::int64_t>(random() % 300) + (s == 0 ? 1 : 0),
                              0});  // an index needs a segment
  return batch;
}

/// Random runs and columns (or row masks) over the visible pairs of all segments.
AttentionPattern random_pattern(const AxisRanges& queries, const KeyAxis& axis, int heads,
                                bool masks, std::mt19937_64& random) {
  const auto blocks = query_blocks(queries, axis);
  PatternArrays index;
  index.visible = visible_keys(queries, axis);
  index.k_tokens = axis.tokens();
  index.index_heads = heads;
  index.segments = axis.segments();
  for (const auto& b : blocks) index.block_segment.push_back(b.segment);
  index.run_offset.push_back(0);
  if (!masks) index.column_offset.push_back(0);
  for (int h = 0; h < heads; ++h) {
    for (const auto& b : blocks) {
      const std::int64_t base = axis.offset[b.segment] / kBlock;
      for (std::int64_t k = 0; k <= b.block; ++k) {
        if (random() % 3 != 0) continue;
        BlockRun run{static_cast<std::int32_t>(base + k), static_cast<std::int32_t>(base + k + 1),
                     -1};
        if (masks && random() % 2 == 0) {
          run.row_mask = static_cast<std::int32_t>(index.row_masks.size());
          index.row_masks.push_back(random());
        }
        index.runs.push_back(run);
      }
      index.run_offset.push_back(static_cast<std::int64_t>(index.runs.size()));
    }
    for (int s = 0; !masks && s < axis.segments(); ++s) {
      for (std::int64_t c = 0; c < axis.count[s]; ++c)
        if (random() % 9 == 0)
          index.columns.push_back(static_cast<std::int32_t>(axis.offset[s] + c));
      index.column_offset.push_back(static_cast<std::int64_t>(index.columns.size()));
    }
  }
  if (!masks) cover_columns(index);
  return AttentionPattern(std::move(index));
}

TEST(KeyAxisSlow, ShardsTogetherHoldThePairsOfTheWhole) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937_64 random(seed);
  for (int trial = 0; trial < 24; ++trial) {
    const LayoutCase l = kLayouts[trial % 4];
    const std::int64_t align = l.stripe == 64 || trial % 8 < 4 ? kBlock : 2 * kBlock;
    const MicroBatch batch = aligned_batch(random, align);
    const int ranks = 1 + static_cast<int>(random() % 4);
    const SequenceLayout layout(l.kind, batch.axis_tokens(), ranks, l.stripe, align);
    for (int me = 0; me < ranks; ++me) {
      const AttentionAxes axes = attention_axes(batch, layout, me);
      const KeyAxis axis = key_axis(axes);
      const AttentionPattern whole = random_pattern(axes.queries, axis, 2, trial % 3 == 0, random);
      ASSERT_EQ(problems(whole), "");
      const auto shards = split_keys(whole, axis, axes.keys);
      double pairs = 0;
      for (int s = 0; s < ranks; ++s) {
        ASSERT_EQ(problems(shards[s]), "") << name(l.kind) << " rank " << me << " shard " << s;
        pairs += shards[s].pairs_per_head();
        const auto queries = tokens_of(axes.queries), keys = tokens_of(axes.keys[s]);
        for (int h = 0; h < 2; ++h)
          for (std::size_t i = 0; i < queries.size(); ++i)
            for (std::size_t j = 0; j < keys.size(); ++j) {
              const AxisToken key = keys[j], query = queries[i];
              const bool visible = query.segment >= 0 && query.segment == key.segment &&
                                   key.position <= query.position;
              const bool expected =
                  visible && computed(whole, h, i, axis.global(key.segment, key.position));
              ASSERT_EQ(computed(shards[s], h, i, j), expected)
                  << name(l.kind) << " rank " << me << " shard " << s << " pair " << i << ", " << j;
            }
      }
      EXPECT_EQ(pairs, whole.pairs_per_head());
    }
  }
}

TEST(KeyAxis, APrefixComesBeforeTheChunk) {
  // A chunk [128, 192) of a sample whose keys of [0, 128) are stored: two ranks, each with its
  // slices of both.
  AttentionAxes axes;
  std::vector<AxisRanges> keys(2);
  for (std::int64_t p = 0; p < 192; p += 64) append(keys[p / 64 % 2], {0, p, 64});
  axes.keys = keys;
  const KeyAxis axis = key_axis(axes);
  EXPECT_EQ(axis.tokens(), 192);
  const AxisRanges queries{{0, 128, 64}};
  EXPECT_EQ(query_blocks(queries, axis).at(0).block, 2);
  GeneratedPattern pattern;
  pattern.density = 1;
  double pairs = 0;
  for (const auto& shard : split_keys(generated_pattern(queries, axis, pattern), axis, keys))
    pairs += shard.pairs_per_head();
  EXPECT_EQ(pairs, 64 * 128 + 64 * 65 / 2);
}

TEST(KeyAxis, CutBlocksAreRefused) {
  const MicroBatch batch{{{0, 0, 256, 0}}};
  const auto cut = [&](std::int64_t stripe) {
    const AttentionAxes axes =
        attention_axes(batch, SequenceLayout(LayoutKind::striped, 256, 2, stripe), 0);
    const KeyAxis axis = key_axis(axes);
    return split_keys(generated_pattern(axes.queries, axis, GeneratedPattern()), axis, axes.keys);
  };
  EXPECT_NO_THROW(cut(64));
  EXPECT_THROW(cut(1), Error);
  EXPECT_THROW(cut(96), Error);
  AttentionAxes gap;
  gap.keys = {{{0, 0}, {0, 2}}};
  EXPECT_THROW(key_axis(gap), Error);
}

TEST(GeneratedIndex, HoldsThePatternsOfItsSegments) {
  GeneratedPattern pattern;
  pattern.heads = 3;
  pattern.density = 0.4;
  pattern.band_tokens = 128;
  pattern.columns = 20;
  pattern.seed = test_seed();
  SCOPED_TRACE(fmt::format("seed {}", pattern.seed));
  MicroBatch batch{{{0, 0, 1024, 0}, {1, 0, 500, 0}}};
  batch.align = kBlock;
  const SequenceLayout layout(LayoutKind::contiguous, batch.axis_tokens(), 1);
  const AttentionAxes axes = attention_axes(batch, layout, 0);
  const KeyAxis axis = key_axis(axes);
  const AttentionPattern index = generated_pattern(axes.queries, axis, pattern);
  ASSERT_EQ(problems(index), "");
  for (int s = 0; s < 2; ++s) {
    GeneratedPattern own = pattern;
    own.tokens = axis.offset[s + 1] - axis.offset[s];
    const auto heads = generate(own);
    for (int h = 0; h < 3; ++h) {
      const std::set<std::int64_t> slashes(heads[h].slashes.begin(), heads[h].slashes.end()),
          columns(heads[h].columns.begin(), heads[h].columns.end());
      for (std::int64_t i = 0; i < axis.count[s]; ++i)
        for (std::int64_t j = 0; j < axis.count[s]; ++j) {
          const bool expected =
              j <= i && (slashes.count(i / kBlock - j / kBlock) != 0 || columns.count(j) != 0);
          ASSERT_EQ(computed(index, h, axis.offset[s] + i, axis.offset[s] + j), expected)
              << "segment " << s << " head " << h << " pair " << i << ", " << j;
        }
    }
  }
}

}  // namespace
}  // namespace ballast
