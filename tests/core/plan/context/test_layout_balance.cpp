// Predicted balance of layouts against counting pair by pair.
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/context/layout_balance.hpp"

namespace ballast {
namespace {

constexpr LayoutKind kKinds[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped,
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
  for (const auto kind : kKinds)
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
    return balance(m, SequenceLayout(kind, m, 4)).imbalance(0);
  };
  EXPECT_NEAR(of(one, LayoutKind::zigzag), 1, 1e-9);
  EXPECT_NEAR(of(one, LayoutKind::document_zigzag), 1, 1e-9);
  EXPECT_NEAR(of(one, LayoutKind::contiguous), 1.75, 0.01);  // the last quarter of a triangle
  EXPECT_GT(of(packed, LayoutKind::zigzag), 1.3);
  EXPECT_LT(of(packed, LayoutKind::striped), 1.05);
  EXPECT_LT(of(packed, LayoutKind::document_zigzag), 1.002);
  EXPECT_EQ(balance(MicroBatch{}, SequenceLayout(LayoutKind::striped, 0, 4)).imbalance(1), 1);
}

TEST(LayoutBalance, TheMostEvenLayoutIsChosen) {
  LayoutChoice choice{.rule = {LayoutKind::automatic, 64, 1}};
  MicroBatch packed{{{0, 0, 5000, 0}, {1, 0, 700, 0}, {2, 0, 300, 0}}};
  EXPECT_EQ(choice.of(packed, 4).kind, LayoutKind::document_zigzag);
  EXPECT_EQ(choice.of(packed, 1).kind, LayoutKind::contiguous);
  choice.kinds = {LayoutKind::contiguous, LayoutKind::striped};
  EXPECT_EQ(choice.of({{{0, 0, 64 * 64, 0}}}, 4).kind, LayoutKind::striped);
  // Whole documents on each rank are as even as stripes.
  EXPECT_EQ(choice.of({{{0, 0, 64, 0}, {1, 0, 64, 0}}}, 2).kind, LayoutKind::contiguous);
  choice.kinds = {};
  EXPECT_THROW(choice.of(packed, 4), Error);
  choice.rule.kind = LayoutKind::zigzag;  // as the deck states
  EXPECT_EQ(choice.of(packed, 4).kind, LayoutKind::zigzag);
}

}  // namespace
}  // namespace ballast
