// Patterns that do not look at Q and K, kept over micro-batches.
#include <gtest/gtest.h>

#include "parallel/pattern/fixed_sources.hpp"

namespace ballast {
namespace {

TEST(IndexCache, KeepsIndexesOfEqualShapes) {
  IndexCache cache;
  int built = 0;
  const auto get = [&](std::vector<Segment> segments, int ranks, int rank, int first_head = 0) {
    MicroBatch batch{std::move(segments)};
    batch.align = kBlock;
    return cache.get(
        attention_axes(batch, SequenceLayout(LayoutKind::striped, batch.axis_tokens(), ranks, 64),
                       rank),
        first_head, 4, [&] {
          ++built;
          return std::vector<AttentionPattern>();
        });
  };
  const auto first = get({{0, 0, 200, 0}}, 2, 0);
  EXPECT_EQ(get({{7, 0, 200, 0}}, 2, 0), first) << "another sample of the same length";
  EXPECT_EQ(built, 1);
  get({{0, 0, 201, 0}}, 2, 0);
  get({{0, 0, 200, 0}}, 2, 1);
  get({{0, 0, 100, 0}, {1, 0, 100, 0}}, 2, 0);
  EXPECT_EQ(built, 4);
  get({{0, 0, 200, 0}}, 2, 0, 4);  // other heads of the layer
  EXPECT_EQ(built, 5);
  for (int i = 0; i < 20; ++i) get({{0, 0, 300 + 64 * i, 0}}, 1, 0);
  EXPECT_EQ(built, 25);
  get({{0, 0, 200, 0}}, 2, 0);
  EXPECT_EQ(built, 26) << "old shapes are dropped";
}

}  // namespace
}  // namespace ballast
