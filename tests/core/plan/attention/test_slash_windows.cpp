// Windows of vertical-slash patterns, and how many of them are observed at a time.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "core/plan/attention/slash_windows.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

KeyAxis axis_of(const std::vector<std::int64_t>& lengths) {
  KeyAxis axis{{0}, {}, {}};
  for (const std::int64_t n : lengths) {
    axis.first_position.push_back(0);
    axis.count.push_back(n);
    axis.offset.push_back(axis.offset.back() + (n + 63) / 64 * 64);
  }
  return axis;
}

AttentionOptions options_of(IndexSelection selection, std::int64_t last_q, std::int64_t stretch) {
  AttentionOptions options;
  options.pattern = PatternKind::vertical_slash;
  options.selection = selection;
  options.last_q = last_q;
  options.stretch = stretch;
  return options;
}

TEST(SlashWindows, ACausalSelectionObservesNoMoreAtATimeThanTheLastQueriesOfAllSegments) {
  std::mt19937_64 random(test_seed());
  SCOPED_TRACE(fmt::format("seed {}", test_seed()));
  for (int n = 0; n < 200; ++n) {
    std::vector<std::int64_t> lengths;
    for (std::uint64_t s = 1 + random() % 6; s > 0; --s)
      lengths.push_back(1 + static_cast<std::int64_t>(random() % 3000));
    const KeyAxis axis = axis_of(lengths);
    const std::vector<std::int64_t> first(lengths.size(), 0);
    const auto last_q = 1 + static_cast<std::int64_t>(random() % 64);
    const std::int64_t most =
        last_q * std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    const auto last =
        slash_windows(options_of(IndexSelection::last, last_q, 64), axis, first, false);
    EXPECT_EQ(observed_batches(last, axis, last_q), (std::vector<std::size_t>{0, lengths.size()}));

    const auto causal =
        slash_windows(options_of(IndexSelection::causal, last_q, 64), axis, first, false);
    const std::vector<std::size_t> edges = observed_batches(causal, axis, last_q);
    ASSERT_EQ(edges.front(), 0u);
    ASSERT_EQ(edges.back(), causal.size());
    std::int64_t before = 0;
    for (std::size_t b = 0; b + 1 < edges.size(); ++b) {
      ASSERT_LT(edges[b], edges[b + 1]);
      std::int64_t pairs = 0;
      for (std::size_t w = edges[b]; w < edges[b + 1]; ++w)
        pairs += observed_pairs(causal[w], axis);
      EXPECT_LE(pairs, most);
      if (b > 0) {
        EXPECT_GT(before + observed_pairs(causal[edges[b]], axis), most) << "room is left";
      }
      before = pairs;
    }
  }
}

TEST(SlashWindows, PairsAreTheKeysUpToEachObservedQuery) {
  const KeyAxis axis = axis_of({300, 40});
  const std::vector<std::int64_t> first{128, 0};
  const auto windows =
      slash_windows(options_of(IndexSelection::causal, 16, 64), axis, first, false);
  std::int64_t observed = 0;
  for (const SlashWindow& window : windows) {
    std::int64_t pairs = 0;
    for (const AxisRange& rows : window.rows)
      for (std::int64_t p = rows.position; p < rows.end(); ++p) pairs += p + 1;
    EXPECT_EQ(observed_pairs(window, axis), window.observed() ? pairs : 0);
    observed += window.observed();
  }
  // Of the first segment the stretches from 192 and 256 on; what begins the chunk is handed in.
  EXPECT_EQ(observed, 2);
}

}  // namespace
}  // namespace ballast
