// Stored keys of samples in chunks: which of them come at once.
#include <gtest/gtest.h>

#include <vector>

#include "core/base/error.hpp"
#include "parallel/context/kv_store.hpp"

namespace ballast {
namespace {

/// Five chunks of 64 tokens on each of two ring ranks, the last one shorter.
KvStore store(const KvPlace& place) {
  std::vector<KvStore::ShardKeys> chunks;
  for (std::int64_t c = 0; c < 5; ++c) {
    const std::int64_t tokens = c < 4 ? 64 : 16;
    chunks.push_back({{{0, 128 * c, tokens}}, {{0, 128 * c + tokens, tokens}}});
  }
  return {chunks, 0, 1, place};
}

// A window holds as many whole chunks as its tokens over all ranks do, at least one.
TEST(KvStore, WindowsHoldNoMoreThanTheirTokens) {
  KvPlace place;
  EXPECT_EQ(store(place).turns(4), 1) << "all lie on the device";
  place.offload = true;
  for (const auto& [tokens, chunks] :
       {std::pair{1, 1}, {128, 1}, {255, 1}, {256, 2}, {383, 2}, {384, 3}, {4096, 32}}) {
    place.window_tokens = tokens;
    const KvStore kept = store(place);
    EXPECT_EQ(kept.turns(4), 1 + (4 + chunks - 1) / chunks) << tokens;
    EXPECT_EQ(kept.turns(0), 1);
    const AttentionAxes axes = kept.axes(4);
    ASSERT_EQ(axes.turns.size(), static_cast<std::size_t>(2 * kept.turns(4)));
    for (std::size_t turn = 1; turn < axes.turns.size() / 2; ++turn) {
      const std::int64_t held =
          token_count(axes.turns[2 * turn]) + token_count(axes.turns[2 * turn + 1]);
      EXPECT_LE(held, std::max(tokens, 128));
    }
  }
}

TEST(KvStore, ChunksOverUnlikeRingsAreErrors) {
  const KvPlace place;
  EXPECT_THROW(KvStore({{{{0, 0, 64}}, {{0, 64, 64}}}, {{{0, 128, 64}}}}, 0, 1, place), Error);
  EXPECT_THROW(KvStore({}, 0, 1, place), Error);
}

}  // namespace
}  // namespace ballast
