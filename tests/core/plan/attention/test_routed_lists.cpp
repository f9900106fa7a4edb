// Lists of the query rows that chose each block of keys, against the choice itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "core/plan/attention/routed_lists.hpp"
#include "core/plan/context/axis_range.hpp"
#include "tests/seed.hpp"

namespace ballast::test {
namespace {

constexpr int kSlots = 5, kHeads = 6, kKvHeads = 2, kGroup = 3;

/// Segments of whole query blocks, `per` of them a pattern block.
struct Choice {
  std::vector<std::int32_t> first, own;
  std::vector<std::set<int>> of;  ///< [heads, tokens] pattern blocks that a row lists
  std::vector<std::uint64_t> words;
  RoutedAxis axis;
  Choice(const std::vector<int>& segments, int per, std::mt19937_64& rng) {
    int blocks = 0, width = 1;
    for (int n : segments) {
      for (int b = 0; b < n; ++b) first.push_back(blocks), own.push_back(blocks + b / per);
      blocks += (n + per - 1) / per;
      width = std::max(width, (n + per - 1) / per);
    }
    const int count = static_cast<int>(own.size());
    axis = {kHeads, kKvHeads, blocks, width, kSlots, first, own};
    of.resize(static_cast<std::size_t>(kHeads) * count * kBlock);
    words.assign(static_cast<std::size_t>(kHeads) * count * width, 0);
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < count * kBlock; ++i) {
        const int b = i / kBlock, before = own[b] - first[b];
        auto& chosen = of[static_cast<std::size_t>(h) * count * kBlock + i];
        while (static_cast<int>(chosen.size()) < std::min(before, kSlots))
          chosen.insert(first[b] + static_cast<int>(rng() % before));
        std::set<int> all = chosen;
        all.insert(own[b]);
        for (int g : all)
          words[(static_cast<std::size_t>(h) * count + b) * width + g - first[b]] |=
              1ull << (i % kBlock);
        if (before <= kSlots) chosen.clear();  // it chooses all: dense attention has it
      }
  }
};

TEST(RoutedListsSlow, HoldEveryChoiceOnceInOrder) {
  std::mt19937_64 rng(test_seed());
  const Choice choice({140, 1, 17, 40}, 4, rng);
  const RoutedLists lists = routed_lists(choice.axis, choice.words);
  const int count = choice.axis.query_blocks();
  ASSERT_EQ(choice.axis.chunks(), 4);
  ASSERT_EQ(static_cast<int>(lists.offset.size()), choice.axis.lists() + 1);
  std::vector<std::set<int>> found(choice.of.size());
  for (int list = 0; list < choice.axis.lists(); ++list) {
    const int chunk = list / choice.axis.blocks / kKvHeads, block = list % choice.axis.blocks;
    std::tuple<int, int, int> before{-1, 0, 0};
    for (std::int64_t e = lists.offset[list]; e < lists.offset[list + 1]; ++e) {
      const int token = static_cast<int>(lists.entries[e] >> 4),
                g = static_cast<int>(lists.entries[e] & 15),
                head = list / choice.axis.blocks % kKvHeads * kGroup + g;
      ASSERT_EQ(token / kBlock / kRoutedChunk, chunk);
      const std::tuple at{token / kBlock, g, token % kBlock};
      ASSERT_LT(before, at);
      before = at;
      ASSERT_TRUE(
          found[static_cast<std::size_t>(head) * count * kBlock + token].insert(block).second);
    }
  }
  EXPECT_EQ(found, choice.of);
}

TEST(RoutedListsSlow, PlacesLeadBackToARowsBlocks) {
  std::mt19937_64 rng(test_seed());
  const Choice choice({200, 33}, 2, rng);
  const RoutedLists lists = routed_lists(choice.axis, choice.words);
  for (std::size_t row = 0; row < choice.of.size(); ++row) {
    std::vector<int> blocks;
    for (int s = 0; s < kSlots; ++s) {
      const std::int32_t place = lists.places[row * kSlots + s];
      if (place < 0) continue;
      ASSERT_EQ(s, static_cast<int>(blocks.size()));
      const auto list =
          std::upper_bound(lists.offset.begin(), lists.offset.end(), place) - lists.offset.begin();
      blocks.push_back(static_cast<int>((list - 1) % choice.axis.blocks));
      const std::int64_t tokens = std::int64_t{choice.axis.query_blocks()} * kBlock;
      ASSERT_EQ(lists.entries[place],
                routed_entry(static_cast<std::int64_t>(row) % tokens,
                             static_cast<int>(static_cast<std::int64_t>(row) / tokens) % kGroup));
    }
    ASSERT_TRUE(
        std::equal(blocks.begin(), blocks.end(), choice.of[row].begin(), choice.of[row].end()));
  }
}

}  // namespace
}  // namespace ballast::test
