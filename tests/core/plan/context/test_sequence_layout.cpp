// Layouts: exact inverses for any lengths, and local tokens against the definition.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"

namespace ballast {
namespace {

constexpr LayoutKind kKinds[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
                                 LayoutKind::shuffled, LayoutKind::document_zigzag};

/// Owner of a position by the definition in the header, one position at a time.
int owner(LayoutKind kind, std::int64_t tokens, int ranks, std::int64_t stripe, std::int64_t align,
          std::int64_t global) {
  if (kind == LayoutKind::striped) return static_cast<int>(global / stripe % ranks);
  const bool folded = kind != LayoutKind::contiguous;
  const std::int64_t parts = folded ? 2 * ranks : ranks;
  std::int64_t piece = 0;
  for (std::int64_t i = 1; i < parts; ++i)
    if (tokens * i / parts / align * align <= global) piece = i;
  return static_cast<int>(folded && piece >= ranks ? parts - 1 - piece : piece);
}

struct Location {
  int rank = 0;
  std::int64_t index = 0;
  bool operator==(const Location&) const = default;
};
/// Where a position lies, by asking the ranks one after another; a failure where no rank has it.
Location locate(const SequenceLayout& layout, std::int64_t global) {
  for (int r = 0; r < layout.ranks(); ++r) {
    const std::int64_t i = layout.lower_bound(r, global);
    if (i < layout.local_tokens(r) && layout.global(r, i) == global) return {r, i};
  }
  ADD_FAILURE() << "no rank has position " << global;
  return {};
}

TEST(SequenceLayout, MapsAreExactInverses) {
  for (auto kind : kKinds)
    for (std::int64_t tokens : {0, 1, 2, 3, 5, 7, 63, 64, 65, 127, 129, 500, 1000})
      for (int ranks : {1, 2, 3, 4, 7, 8})
        for (std::int64_t stripe : {1, 3, 64})
          for (std::int64_t align : {1, 5, 64}) {
            if (deals_stripes(kind) ? align != 1 : stripe != 64)
              continue;  // the other parameter has no meaning
            SCOPED_TRACE(fmt::format("{} {} tokens, {} ranks, stripe {}, align {}", name(kind),
                                     tokens, ranks, stripe, align));
            const SequenceLayout layout(kind, tokens, ranks, stripe, align);
            std::vector<std::int64_t> count(ranks, 0);
            for (std::int64_t g = 0; g < tokens; ++g) {
              const auto at = locate(layout, g);
              if (kind != LayoutKind::shuffled)
                ASSERT_EQ(at.rank, owner(kind, tokens, ranks, stripe, align, g));
              ASSERT_EQ(at.index, count[at.rank]++);  // local indices ascend with the global
                                                      // position and leave no gap
              for (int r = 0; r < ranks; ++r)
                ASSERT_EQ(layout.lower_bound(r, g), r == at.rank ? at.index : count[r]);
            }
            for (int r = 0; r < ranks; ++r) {
              ASSERT_EQ(layout.local_tokens(r), count[r]);
              ASSERT_EQ(layout.lower_bound(r, tokens), count[r]);
              ASSERT_EQ(layout.lower_bound(r, tokens + 9), count[r]);
              ASSERT_EQ(layout.lower_bound(r, -1), 0);
              std::int64_t index = 0, previous_end = -1;
              for (const auto& [begin, end] : layout.pieces(r)) {
                ASSERT_LT(begin, end);
                ASSERT_GT(begin, previous_end);  // maximal: pieces that touch are one
                previous_end = end;
                for (std::int64_t g = begin; g < end; ++g) ASSERT_EQ(layout.global(r, index++), g);
              }
              ASSERT_EQ(index, count[r]);
            }
          }
}

TEST(SequenceLayout, ShuffledRoundsGiveEveryRankOneStripe) {
  for (const int ranks : {1, 2, 5, 32})
    for (const std::int64_t stripe : {1, 64}) {
      const std::int64_t rounds = 600;  // more than have an order of their own
      const SequenceLayout layout(LayoutKind::shuffled, rounds * ranks * stripe + stripe / 2, ranks,
                                  stripe);
      std::vector<std::vector<int>> orders;
      for (std::int64_t round = 0; round < rounds; ++round) {
        std::vector<int> order;
        for (int i = 0; i < ranks; ++i) {
          const std::int64_t first = (round * ranks + i) * stripe;
          order.push_back(locate(layout, first).rank);
          EXPECT_EQ(locate(layout, first + stripe - 1).rank, order.back());
        }
        orders.push_back(order);
        std::sort(order.begin(), order.end());
        for (int r = 0; r < ranks; ++r) EXPECT_EQ(order[r], r);
      }
      std::sort(orders.begin(), orders.end());
      const auto distinct = std::unique(orders.begin(), orders.end()) - orders.begin();
      EXPECT_GE(distinct, ranks == 1 ? 1 : ranks == 2 ? 2 : ranks == 5 ? 90 : 256);
      EXPECT_EQ(
          locate(SequenceLayout(LayoutKind::shuffled, 77 * stripe, ranks, stripe), 40 * stripe),
          locate(layout, 40 * stripe));
    }
}

TEST(SequenceLayout, PiecesStartAtTheAlignment) {
  for (auto kind : {LayoutKind::contiguous, LayoutKind::zigzag})
    for (std::int64_t tokens : {64, 1000, 4096, 5001}) {
      const SequenceLayout layout(kind, tokens, 4, 64, 64);
      for (int r = 0; r < 4; ++r)
        for (const auto& piece : layout.pieces(r)) EXPECT_EQ(piece.first % 64, 0);
    }
}

TEST(SequenceLayout, LoadsDifferByOnePieceAtMost) {
  for (std::int64_t tokens : {1000, 4099}) {
    for (auto kind : kKinds) {
      const SequenceLayout layout(kind, tokens, 8, 1);
      for (int r = 0; r < 8; ++r)
        EXPECT_LE(std::abs(layout.local_tokens(r) - tokens / 8), 2) << name(kind);
    }
  }
}

TEST(SequenceLayout, HugeLengthsDoNotOverflow) {
  const std::int64_t tokens = (std::int64_t{1} << 50) + 12345;
  for (auto kind : kKinds) {
    const SequenceLayout layout(kind, tokens, 1000, 64);
    for (std::int64_t g : {std::int64_t{0}, tokens / 3, tokens - 1}) locate(layout, g);
  }
  const SequenceLayout one_stripe(LayoutKind::striped, 100, 3, std::int64_t{1} << 62);
  EXPECT_EQ(one_stripe.local_tokens(0), 100);
  EXPECT_EQ(one_stripe.local_tokens(1), 0);
  EXPECT_EQ(one_stripe.pieces(0).size(), 1u);
}

TEST(SequenceLayout, NamesGoBothWays) {
  for (auto kind : kKinds) EXPECT_EQ(parse<LayoutKind>(name(kind)), kind);
  EXPECT_THROW(parse_or_fail<LayoutKind>("zig-zag", "sequence layout"), Error);
}

TEST(SequenceLayout, BadInputIsRefused) {
  EXPECT_THROW(SequenceLayout(LayoutKind::zigzag, -1, 2), Error);
  EXPECT_THROW(SequenceLayout(LayoutKind::zigzag, 8, 0), Error);
  EXPECT_THROW(SequenceLayout(LayoutKind::striped, 8, 2, 0), Error);
  EXPECT_THROW(SequenceLayout(LayoutKind::contiguous, 8, 2, 64, 0), Error);
  const SequenceLayout layout(LayoutKind::zigzag, 8, 2);
  EXPECT_THROW(layout.global(0, 4), Error);
  EXPECT_THROW(layout.global(2, 0), Error);
  EXPECT_THROW(layout.local_tokens(-1), Error);
}

TEST(SequenceLayout, DocumentZigzagCutsEverySegmentByItself) {
  for (const std::int64_t align : {1, 64})
    for (const int ranks : {1, 2, 3, 8}) {
      MicroBatch batch{{{0, 0, 0, 0},
                        {1, 0, 1000, 0},
                        {2, 0, 0, 0},
                        {3, 64, 1600, 0},
                        {4, 0, 1, 0},
                        {5, 0, 4097, 0},
                        {6, 0, 0, 0}}};
      batch.align = align;
      const PackedAxis axis(batch);
      const SequenceLayout layout(LayoutKind::document_zigzag, batch, ranks, 64, align);
      std::vector<std::int64_t> count(static_cast<std::size_t>(ranks), 0);
      for (std::int64_t g = 0; g < axis.offset.back(); ++g) {
        const int s = axis.segment_of(g);
        const std::int64_t length = axis.offset[s + 1] - axis.offset[s], parts = 2 * ranks;
        std::int64_t piece = 0;
        for (std::int64_t i = 1; i < parts; ++i)
          if (length * i / parts / align * align <= g - axis.offset[s]) piece = i;
        const int folded = static_cast<int>(std::min(piece, parts - 1 - piece));
        const auto at = locate(layout, g);
        ASSERT_EQ((at.rank + s) % ranks, folded) << g;
        ASSERT_EQ(at.index, count[at.rank]);
        for (int r = 0; r < ranks; ++r) ASSERT_EQ(layout.lower_bound(r, g), count[r]) << g;
        ++count[at.rank];
      }
      for (int r = 0; r < ranks; ++r) {
        ASSERT_EQ(layout.local_tokens(r), count[r]);
        std::int64_t index = 0;
        for (const auto& [begin, end] : layout.pieces(r)) {
          ASSERT_EQ(begin % align, 0);
          for (std::int64_t g = begin; g < end; ++g) ASSERT_EQ(layout.global(r, index++), g);
        }
        ASSERT_EQ(index, count[r]);
      }
    }
  EXPECT_EQ(SequenceLayout(LayoutKind::document_zigzag, MicroBatch{}, 4).local_tokens(3), 0);
}

TEST(PackedAxis, SkipsEmptySegments) {
  const MicroBatch batch{{{4, 0, 0, 0}, {9, 0, 3, 3}, {5, 7, 7, 0}, {6, 10, 12, 2}, {8, 0, 0, 0}}};
  const PackedAxis axis(batch);
  EXPECT_EQ(axis.offset, (std::vector<std::int64_t>{0, 0, 3, 3, 5, 5}));
  EXPECT_EQ(axis.segment_of(0), 1);
  EXPECT_EQ(axis.segment_of(2), 1);
  EXPECT_EQ(axis.segment_of(3), 3);
  EXPECT_THROW(axis.segment_of(5), Error);
  EXPECT_THROW(axis.segment_of(-1), Error);
}

TEST(PackedAxis, LocalTokensAreThoseOfTheLayout) {
  const MicroBatch batch{
      {{0, 0, 5, 5}, {1, 0, 0, 0}, {2, 100, 171, 71}, {3, 0, 1, 1}, {4, 0, 130, 130}}};
  const PackedAxis axis(batch);
  for (auto kind : kKinds)
    for (int ranks : {1, 3, 8})
      for (std::int64_t stripe : {1, 3, 64}) {
        const SequenceLayout layout(kind, batch.tokens(), ranks, stripe);
        for (int r = 0; r < ranks; ++r) {
          const auto tokens = local_tokens(batch, layout, r);
          ASSERT_EQ(static_cast<std::int64_t>(tokens.size()), layout.local_tokens(r));
          for (std::int64_t i = 0; i < layout.local_tokens(r); ++i) {
            const std::int64_t packed = layout.global(r, i);
            const int segment = axis.segment_of(packed);
            ASSERT_EQ(tokens[i].segment, segment);
            ASSERT_EQ(tokens[i].position,
                      batch.segments[segment].begin + packed - axis.offset[segment]);
          }
        }
      }
  EXPECT_THROW(local_tokens(batch, SequenceLayout(LayoutKind::zigzag, batch.tokens() + 1, 2), 0),
               Error);
}

}  // namespace
}  // namespace ballast
