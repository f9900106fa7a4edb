// Recorded choices: which one a segment takes, and the pairs that they give.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "core/base/error.hpp"
#include "core/plan/attention/generated_pattern.hpp"
#include "core/plan/attention/recorded_pattern.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

VerticalSlash drawn(std::mt19937_64& random, std::int64_t tokens) {
  VerticalSlash head;
  for (std::int32_t d = 0; d * std::int64_t{kBlock} < tokens; ++d)
    if (d == 0 || random() % 3 == 0) head.slashes.push_back(d);
  for (std::int64_t c = 0; c < tokens; ++c)
    if (random() % 30 == 0) head.columns.push_back(c);
  return head;
}

AttentionAxes axes_of(const std::vector<std::int64_t>& lengths) {
  AttentionAxes axes;
  axes.align = kBlock;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    axes.first_query.push_back(0);
    append(axes.queries, {static_cast<std::int32_t>(s), 0, lengths[s]});
    append(axes.queries, {-1, 0, (kBlock - lengths[s] % kBlock) % kBlock});
  }
  axes.keys = {axes.queries};
  return axes;
}

TEST(RecordedPattern, EverySegmentHasTheChoiceOfTheNearestLength) {
  std::mt19937_64 random(test_seed());
  RecordedIndexes recorded;
  std::map<std::tuple<int, int, std::int64_t>, VerticalSlash> all;
  for (const std::int64_t tokens : {300, 700})
    for (int layer = 0; layer < 2; ++layer)
      for (int head = 0; head < 3; ++head) {
        const VerticalSlash choice = drawn(random, tokens);
        all[{layer, head, tokens}] = choice;
        recorded.add(layer, head, {tokens, {{0, false, choice}}});
      }
  EXPECT_EQ(recorded.layers(), 2);
  EXPECT_EQ(recorded.heads(), 3);
  const AttentionAxes axes = axes_of({310, 640, 64});
  const KeyAxis axis = key_axis(axes);
  for (int layer = 0; layer < 4; ++layer) {  // counted round
    const AttentionPattern pattern = recorded_pattern(axes.queries, axis, recorded, layer, 1, 2);
    EXPECT_EQ(problems(pattern.arrays()), "");
    std::vector<std::vector<VerticalSlash>> heads(3);
    for (int s = 0; s < 3; ++s)
      for (int head : {1, 2}) heads[s].push_back(all[{layer % 2, head, s == 1 ? 700 : 300}]);
    const AttentionPattern expected = vertical_slash_pattern(axes.queries, axis, heads, true);
    std::int64_t differ = 0;
    for (int h = 0; h < 2; ++h)
      for (std::int64_t i = 0; i < axes.q_tokens(); ++i)
        for (std::int64_t j = 0; j < axis.tokens(); ++j)
          differ += computed(pattern, h, i, j) != computed(expected, h, i, j);
    EXPECT_EQ(differ, 0) << "layer " << layer;
  }
}

TEST(RecordedPattern, BalanceCountsThePairsOfThePattern) {
  std::mt19937_64 random(test_seed());
  RecordedIndexes recorded;
  for (int head = 0; head < 3; ++head)
    recorded.add(0, head, {640, {{0, false, drawn(random, 640)}}});
  const AttentionAxes axes = axes_of({640});
  const AttentionPattern pattern =
      recorded_pattern(axes.queries, key_axis(axes), recorded, 0, 0, 3);
  double pairs = 0;
  for (int h = 0; h < 3; ++h) pairs += pattern.counts().pairs(h);
  const double all = 0.5 * 640 * 641 * 3;
  EXPECT_NEAR(density(recorded_heads(recorded, 640), 640), pairs / all, 1e-12);
}

TEST(RecordedPattern, StretchesThatDoNotFitAreRefused) {
  RecordedIndexes recorded;
  EXPECT_THROW(recorded.at(0, 0, 64), Error);
  recorded.add(0, 0, {256, {{0, false, {{0}, {}}}, {2, true, {{0}, {}}}}});
  recorded.add(0, 1, {256, {{0, false, {{0}, {}}}, {1, true, {{0}, {}}}}});
  EXPECT_THROW(recorded.stretches(0, 0, 2, 256), Error);
  EXPECT_EQ(recorded.stretches(0, 0, 1, 256).size(), 2u);
  EXPECT_EQ(recorded.stretches(0, 0, 1, 128).size(), 1u) << "a stretch behind the end";
  EXPECT_THROW(recorded_heads(recorded, 256), Error);
}

}  // namespace
}  // namespace ballast
