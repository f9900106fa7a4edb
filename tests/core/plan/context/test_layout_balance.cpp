// Predicted balance of layouts against counting pair by pair.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/base/random.hpp"
#include "core/plan/context/layout_balance.hpp"

namespace ballast {
namespace {

constexpr LayoutKind kBalanced[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                                    LayoutKind::shuffled, LayoutKind::document_zigzag};

MicroBatch random_pack(std::uint64_t seed, int segments, std::int64_t longest) {
  MicroBatch batch;
  for (int s = 0; s < segments; ++s) {
    const auto draw = [&](int i) {
      return static_cast<std::int64_t>(random_bits(seed, s, i) %
                                       static_cast<std::uint64_t>(longest));
    };
    const std::int64_t begin = draw(0) % 3 == 0 ? draw(1) : 0;
    batch.segments.push_back({s, begin, begin + draw(2), 0});
  }
  return batch;
}

TEST(LayoutBalance, IsWhatCountingGives) {
  for (const auto kind : kBalanced)
    for (const int ranks : {1, 2, 3, 8})
      for (const std::int64_t align : {1, 64}) {
        MicroBatch batch = random_pack(7, 9, 400);
        batch.align = align;
        const SequenceLayout layout(kind, batch, ranks, 64, align);
        const LayoutBalance found = balance(batch, layout);
        for (int r = 0; r < ranks; ++r) {
          double tokens = 0, pairs = 0;
          for (const AxisRange& range : local_ranges(batch, layout, r))
            for (std::int64_t i = range.position; i < range.end() && !range.padding(); ++i)
              tokens += 1, pairs += static_cast<double>(i + 1);
          EXPECT_EQ(found.tokens[r], tokens);
          EXPECT_EQ(found.pairs[r], pairs) << name(kind) << " rank " << r;
        }
      }
}

TEST(LayoutBalance, ZigzagOfOneDocumentIsEvenAndOfPackedOnesIsNot) {
  MicroBatch one{{{0, 0, 8192, 0}}}, packed;
  for (const std::int64_t n : {5000, 200, 1900, 700, 40, 300, 52})
    packed.segments.push_back({n, 0, n, 0});
  const auto of = [](const MicroBatch& m, LayoutKind kind) {
    LayoutBalance visible = balance(m, SequenceLayout(kind, m, 4));
    visible.rounding.assign(4, 0);
    return visible.cost(0);
  };
  EXPECT_NEAR(of(one, LayoutKind::zigzag), 1, 1e-9);
  EXPECT_NEAR(of(one, LayoutKind::document_zigzag), 1, 1e-9);
  EXPECT_NEAR(of(one, LayoutKind::contiguous), 1.75, 0.01);  // the last quarter of a triangle
  EXPECT_GT(of(packed, LayoutKind::zigzag), 1.3);
  EXPECT_LT(of(packed, LayoutKind::striped), 1.05);
  EXPECT_LT(of(packed, LayoutKind::document_zigzag), 1.002);
  EXPECT_EQ(balance(MicroBatch{}, SequenceLayout(LayoutKind::striped, 0, 4)).cost(1), 1);
}

/// Pairs of the tiles that each rank computes, counted block by block of its queries and shard by
/// shard.
std::vector<double> computed_pairs(const MicroBatch& m, const SequenceLayout& layout) {
  const PackedAxis axis(m);
  std::vector<double> computed;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    double tiles = 0;
    for (int shard = 0; shard < layout.ranks(); ++shard)
      for (std::int64_t block = 0; block < layout.local_tokens(rank); block += kBlock) {
        std::int64_t first = layout.tokens(), last = 0;
        for (auto i = block; i < std::min(block + kBlock, layout.local_tokens(rank)); ++i) {
          const std::int64_t at = layout.global(rank, i),
                             from = axis.offset[static_cast<std::size_t>(axis.segment_of(at))],
                             begin = layout.lower_bound(shard, from),
                             end = layout.lower_bound(shard, at + 1);
          if (begin < end) first = std::min(first, begin), last = std::max(last, end);
        }
        if (first < last)
          tiles += static_cast<double>((last + kKeyTile - 1) / kKeyTile - first / kKeyTile);
      }
    computed.push_back(tiles * static_cast<double>(kBlock * kKeyTile));
  }
  return computed;
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

/// Documents of log-uniform lengths, one after another up to `tokens`.
MicroBatch documents(std::uint64_t seed, std::int64_t tokens, double longest) {
  MicroBatch m;
  for (std::int64_t s = 0, left = tokens; left > 0; ++s) {
    const double u = random_uniform(seed, 1, static_cast<std::uint64_t>(s));
    const auto n = std::min(left, static_cast<std::int64_t>(100 * std::pow(longest / 100, u)));
    m.segments.push_back({s, 0, n, 0});
    left -= n;
  }
  return m;
}

TEST(LayoutBalanceSlow, RoundingIsWhatTilesAdd) {
  for (const int ranks : {2, 4, 8})
    for (const std::uint64_t seed : {1, 2, 3}) {
      const MicroBatch m = documents(seed, 16384, 8192);
      const double alone = sum(computed_pairs(m, SequenceLayout(LayoutKind::contiguous, m, 1)));
      for (const LayoutRule& l : even_layouts(64, 1)) {
        if (l.kind == LayoutKind::contiguous) continue;
        const SequenceLayout layout(l.kind, m, ranks, l.stripe, l.align);
        const LayoutBalance found = balance(m, layout);
        const double added = sum(computed_pairs(m, layout)) - alone;
        EXPECT_NEAR(added / 16384, sum(found.rounding) / 16384,
                    0.1 * sum(found.rounding) / 16384 + 16.0 * ranks)
            << name(l.kind) << " " << l.stripe << ", " << ranks << " ranks, seed " << seed;
      }
    }
}

// Two pieces a rank: both ends of each fall on blocks where the segment is twice the ranks long.
TEST(LayoutBalance, PiecesOnBlocksRoundHalfAsMuch) {
  const auto rounded = [](std::int64_t tokens) {
    const MicroBatch m{{{0, 0, tokens, 0}}};
    return sum(balance(m, SequenceLayout(LayoutKind::document_zigzag, m, 4, 64, 1)).rounding) /
           static_cast<double>(tokens);
  };
  EXPECT_EQ(rounded(2 * 4 * kKeyTile), 0);
  EXPECT_EQ(rounded(4 * kKeyTile), 3 * kBlock / 1.0);
  EXPECT_EQ(rounded(4 * kBlock), 3 * kKeyTile / 1.0);
  EXPECT_EQ(rounded(4 * kBlock + 8), 3 * kKeyTile / 1.0);
}

TEST(LayoutBalanceSlow, TheChosenLayoutComputesAboutTheLeast) {
  const LayoutChoice choice{.rule = {LayoutKind::automatic, 64, 1}};
  for (const int ranks : {2, 3, 4, 8})
    for (std::uint64_t seed = 1; seed < 9; ++seed) {
      const MicroBatch m = documents(seed, 8192, seed % 2 == 0 ? 1000 : 8000);
      const auto slowest = [&](const LayoutRule& l) {
        const auto all = computed_pairs(m, SequenceLayout(l.kind, m, ranks, l.stripe, l.align));
        return *std::max_element(all.begin(), all.end());
      };
      double least = std::numeric_limits<double>::infinity();
      for (const LayoutRule& l : even_layouts(64, 1)) least = std::min(least, slowest(l));
      const LayoutRule chosen = choice.of(m, ranks);
      EXPECT_LE(slowest(chosen), 1.06 * least)
          << name(chosen.kind) << " " << chosen.stripe << ", " << ranks << " ranks, seed " << seed;
    }
}

TEST(LayoutBalance, TheMostEvenLayoutIsChosen) {
  LayoutChoice choice{.rule = {LayoutKind::automatic, 64, 1}};
  MicroBatch packed{{{0, 0, 5000, 0}, {1, 0, 700, 0}, {2, 0, 300, 0}}};
  EXPECT_EQ(choice.of(packed, 4), (LayoutRule{LayoutKind::striped, 128, 1}));  // whole tiles
  packed.segments[0].end = 500000;  // so long that tiles do not count
  EXPECT_EQ(choice.of(packed, 4).kind, LayoutKind::document_zigzag);
  EXPECT_EQ(choice.of({{{0, 0, 4096, 0}}}, 4).kind, LayoutKind::document_zigzag);  // cut by tiles
  EXPECT_EQ(choice.of(packed, 1).kind, LayoutKind::contiguous);
  // Whole documents on each rank are as even as stripes.
  EXPECT_EQ(choice.of({{{0, 0, 64, 0}, {1, 0, 64, 0}}}, 2).kind, LayoutKind::contiguous);
  choice.striped = true;
  EXPECT_EQ(choice.of({{{0, 0, 64 * 64, 0}}}, 4), (LayoutRule{LayoutKind::striped, 64, 1}));
  choice.rule.kind = LayoutKind::zigzag;  // as the deck states
  EXPECT_EQ(choice.of(packed, 4).kind, LayoutKind::zigzag);
}

}  // namespace
}  // namespace ballast
