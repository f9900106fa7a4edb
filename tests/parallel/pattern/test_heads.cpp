// Patterns that differ by head against their definitions, in fp64 by plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/plan/attention/head_rules.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"

namespace ballast {
namespace {

class Heads : public ::testing::Test {
 protected:
  SharedDraw draw{41};
};

/// One head over one segment, as a definition sees it: positions count from the segment's start.
struct HeadView {
  const Data& data;
  const Mask& mask;
  std::int64_t h = 0, first = 0, count = 0;
  bool at(std::int64_t i, std::int64_t j) const {
    const std::int64_t n = data.batch.axis_tokens();
    return mask[(h * n + first + i) * n + first + j] != 0;
  }
  double score_of(std::int64_t i, std::int64_t j) const {
    return score(data.all, h, first + i, first + j);
  }
  std::int64_t blocks() const { return (count + 63) / 64; }
  /// Mean score of queries [begin, end) with the keys of a block: that of their means.
  double pooled(std::int64_t begin, std::int64_t end, std::int64_t block) const {
    double sum = 0, n = 0;
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t j = block * 64; j < std::min(count, block * 64 + 64); ++j, ++n)
        sum += score_of(i, j);
    return sum / n;
  }
};

std::vector<std::int64_t> by_weight(const std::vector<double>& weights) {
  std::vector<std::int64_t> order(weights.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  });
  return order;
}

/// Pairs that differ from expected(i, j), of all visible ones.
template <class Expected>
std::int64_t wrong(const HeadView& head, Expected&& expected) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < head.count; ++i)
    for (std::int64_t j = 0; j <= i; ++j) found += head.at(i, j) != expected(i, j);
  return found;
}

/// Of each block of queries the pooled scores of the blocks up to its own.
std::vector<double> pooled_row(const HeadView& head, std::int64_t block) {
  std::vector<double> scores;
  for (std::int64_t j = 0; j <= block; ++j)
    scores.push_back(head.pooled(block * 64, std::min(head.count, block * 64 + 64), j));
  return scores;
}

TEST_F(Heads, EveryRuleIsItsDefinition) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of("by_head");
  const Data data({600, 700, 30}, options, draw);
  const Mask mask = alone(data, options);
  const PackedAxis axis(data.batch);
  for (int s = 0; s < 3; ++s) {
    HeadView head{data, mask, 0, axis.offset[s], data.batch.segments[s].tokens()};
    if (s == 2) {  // no longer than last_q
      EXPECT_EQ(wrong(head, [](std::int64_t, std::int64_t) { return true; }), 0);
      continue;
    }
    EXPECT_EQ(
        wrong(head, [](std::int64_t i, std::int64_t j) { return j < 128 || i / 64 - j / 64 < 3; }),
        0)
        << "a_shape";
    head.h = 1;
    const auto [column, slash] = observed_mass(data, options, 1, s);
    std::vector<std::int64_t> columns = by_weight(column), slashes = by_weight(slash);
    columns.resize(20), slashes.resize(2);
    const std::set<std::int64_t> in_columns(columns.begin(), columns.end()),
        in_slashes(slashes.begin(), slashes.end());
    EXPECT_EQ(wrong(head,
                    [&](std::int64_t i, std::int64_t j) {
                      return j < 64 || i / 64 == j / 64 || in_columns.count(j) != 0 ||
                             in_slashes.count(i / 64 - j / 64) != 0;
                    }),
              0)
        << "vertical_slash";
    for (head.h = 2; head.h < 4; ++head.h) {
      std::vector<std::set<std::int64_t>> chosen;
      for (std::int64_t b = 0; b < head.blocks(); ++b) {
        std::vector<std::int64_t> order = by_weight(pooled_row(head, b));
        order.resize(std::min<std::size_t>(order.size(), head.h == 2 ? 2 : 4));
        chosen.emplace_back(order.begin(), order.end()).insert({0, b});
      }
      EXPECT_EQ(wrong(head, [&](std::int64_t i,
                                std::int64_t j) { return chosen[i / 64].count(j / 64) != 0; }),
                0)
          << "block_sparse";
    }
  }
}

/// Divergence of a head's pooled estimate from what its last queries attend to.
double divergence_of(const HeadView& head, std::int64_t last_q) {
  std::vector<double> estimate, held(static_cast<std::size_t>(head.blocks()), 0);
  for (std::int64_t b = 0; b < head.blocks(); ++b)
    estimate.push_back(std::exp(head.pooled(head.count - last_q, head.count, b)));
  for (std::int64_t i = head.count - last_q; i < head.count; ++i) {
    double all = 0;
    for (std::int64_t j = 0; j <= i; ++j) all += std::exp(head.score_of(i, j));
    for (std::int64_t j = 0; j <= i; ++j) held[j / 64] += std::exp(head.score_of(i, j)) / all;
  }
  return divergence(estimate, held);
}

/// Blocks that a block of queries computes are the fewest whose pooled softmax reaches the share.
void expect_share_of_blocks(const HeadView& head, double share) {
  for (std::int64_t b = 0; b < head.blocks(); ++b) {
    const std::vector<double> scores = pooled_row(head, b);
    const std::vector<std::int64_t> order = by_weight(scores);
    const double top = scores[static_cast<std::size_t>(order[0])];
    double all = 0, reached = 0;
    for (double s : scores) all += std::exp(s - top);
    std::set<std::int64_t> chosen{0, b};
    bool near = false;  // too near the share to tell in fp32
    for (std::size_t i = 0; i < order.size() && (i == 0 || reached < share); ++i) {
      chosen.insert(order[i]);
      reached += std::exp(scores[static_cast<std::size_t>(order[i])] - top) / all;
      near |= std::abs(reached - share) < 1e-5;
    }
    if (near) continue;
    const std::int64_t i = std::min(head.count, b * 64 + 64) - 1;
    for (std::int64_t j = 0; j <= b; ++j)
      EXPECT_EQ(head.at(i, j * 64), chosen.count(j) != 0)
          << "head " << head.h << ", block " << b << " of queries, " << j << " of keys";
  }
}

TEST_F(Heads, FlexprefillTakesBlocksWhereTheEstimateHolds) {
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = options_of("flexprefill");
  const Data data({600, 700, 640, 30}, options, draw);
  std::vector<double> distances;
  for (int s = 0; s < 3; ++s)
    for (std::int64_t h = 0; h < kHeads; ++h)
      distances.push_back(divergence_of(
          {data, {}, h, PackedAxis(data.batch).offset[s], data.batch.segments[s].tokens()},
          options.last_q));
  std::vector<double> sorted = distances;
  std::sort(sorted.begin(), sorted.end());
  options.flex_threshold = (sorted[5] + sorted[6]) / 2;  // half of them go by blocks
  const Mask mask = alone(data, options);
  AttentionOptions slashes = options_of("vertical_slash");
  slashes.vertical_share = slashes.slash_share = options.flex_share;
  const Mask by_slashes = alone(data, slashes);
  std::size_t i = 0;
  for (int s = 0; s < 3; ++s)
    for (std::int64_t h = 0; h < kHeads; ++h, ++i) {
      const std::int64_t first = PackedAxis(data.batch).offset[s],
                         count = data.batch.segments[s].tokens();
      const HeadView head{data, mask, h, first, count}, same{data, by_slashes, h, first, count};
      if (distances[i] < options.flex_threshold)
        expect_share_of_blocks(head, options.flex_share);
      else
        EXPECT_EQ(wrong(head, [&](std::int64_t q, std::int64_t k) { return same.at(q, k); }), 0)
            << "head " << h << " of segment " << s;
    }
  const HeadView shortest{data, mask, 0, PackedAxis(data.batch).offset[3], 30};
  EXPECT_EQ(wrong(shortest, [](std::int64_t, std::int64_t) { return true; }), 0);
}

TEST_F(Heads, BudgetsAndKindsAreRecorded) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of("by_head");
  const Data data({640}, options, draw);
  const SequenceLayout layout(LayoutKind::contiguous, 640, 1, 64, 64);
  Recorder recorder;
  recorder.enabled = true;
  recorder.context.step = 0;
  const auto source = pattern_source(Communicator(), attention_axes(data.batch, layout, 0), options,
                                     nullptr, &recorder);
  source->shards(data.inputs(data.packed(layout, 0), DType::f32));
  const std::vector<BudgetRow> rows = recorder.take_budgets();
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].budget, 4);  // a window of three blocks, and 64 columns
  EXPECT_EQ(rows[0].kind, static_cast<int>(HeadPattern::a_shape));
  EXPECT_GE(rows[1].budget, 2 + 20.0 / 64);
  EXPECT_EQ(rows[1].kind, static_cast<int>(HeadPattern::vertical_slash));
  EXPECT_GE(rows[2].budget, 1.9);  // the first block of queries has one
  EXPECT_LE(rows[3].budget, 6);
  EXPECT_EQ(rows[3].kind, static_cast<int>(HeadPattern::block_sparse));
}

}  // namespace
}  // namespace ballast
