// Budgets of sparse patterns: what they are weighed by, and what is reported.
#include <gtest/gtest.h>

#include <algorithm>

#include "parallel/pattern/pattern_source.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

using testing::SharedDraw;

constexpr std::int64_t kHeads = 4, kKvHeads = 2, kDim = 8;

AttentionOptions vertical_slash_options() {
  AttentionOptions o;
  o.pattern = PatternKind::vertical_slash;
  o.vertical_share = 0.3;
  o.slash_share = 0.5;
  o.last_q = 48;
  return o;
}

Tensor random_rows(SharedDraw& draw, std::int64_t rows, std::int64_t heads) {
  Tensor t = Tensor::empty({rows, heads, kDim}, DType::f32);
  const std::vector<double> values = draw.normals(t.numel());
  std::copy(values.begin(), values.end(), t.data<float>());
  return t;
}

/// Takes one stated budget and keeps the coverage that it was told.
class Stated final : public BudgetPolicy {
 public:
  explicit Stated(std::int64_t budget) : budget_(budget) {}
  std::span<const std::int64_t> candidates() const override { return candidates_; }
  std::int64_t choose(int, std::span<const double> told) override {
    coverage.assign(told.begin(), told.end());
    return budget_;
  }
  std::vector<double> coverage;

 private:
  std::vector<std::int64_t> candidates_{1, 2, 3, 4, 6, 9, 14};
  std::int64_t budget_;
};

TEST(PatternBudgets, CoverageOfADependentChunkWeighsItsOwnQueriesAlone) {
  SharedDraw draw{41};
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = vertical_slash_options();
  // A chunk of 128 queries after 512 stored keys, and a segment of 40 tokens that is dense.
  const AxisRange chunk{0, 512, 128}, stored{0, 0, 640}, short_one{1, 0, 40}, padding{-1, 0, 24};
  AttentionAxes alone, both;
  alone.align = both.align = kBlock;
  alone.first_query = {512};
  alone.queries = {chunk};
  alone.keys = {{stored}};
  both.first_query = {512, 0};
  both.queries = {chunk, short_one, padding};
  both.keys = {{stored, short_one, padding}};
  AttentionInputs in;
  in.scale = 0.5;
  in.q = random_rows(draw, 192, kHeads);
  in.k = in.v = random_rows(draw, 704, kKvHeads);
  Stated of_both(2), of_chunk(2);
  pattern_source(Communicator(), both, options, &of_both, nullptr)->shards(in);
  in.q = in.q.rows(0, 128);
  in.k = in.v = in.k.rows(0, 640);
  pattern_source(Communicator(), alone, options, &of_chunk, nullptr)->shards(in);
  ASSERT_FALSE(of_chunk.coverage.empty());
  EXPECT_LT(of_chunk.coverage.front(), 0.9);
  for (std::size_t c = 0; c < of_chunk.coverage.size(); ++c)
    EXPECT_NEAR(of_both.coverage[c], (128 * of_chunk.coverage[c] + 40) / 168, 1e-8);
}

TEST(PatternBudgets, ReportedBudgetsAreSlashesAndColumnsOver64) {
  SharedDraw draw{41};
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = vertical_slash_options();
  AttentionAxes axes;
  axes.align = kBlock;
  axes.first_query = {0};
  axes.queries = {{0, 0, 640}};
  axes.keys = {axes.queries};
  AttentionInputs in;
  in.q = random_rows(draw, 640, kHeads);
  in.k = in.v = random_rows(draw, 640, kKvHeads);
  Recorder recorder;
  recorder.enabled = true;
  const auto source = pattern_source(Communicator(), axes, options, nullptr, &recorder);
  const AttentionWork work = source->shards(in).front();
  const PatternArrays& pattern = work.host()->arrays();
  const std::vector<BudgetRow> rows = recorder.take_budgets();
  ASSERT_EQ(rows.size(), static_cast<std::size_t>(kHeads));
  for (int h = 0; h < kHeads; ++h) {
    const std::int64_t columns = pattern.column_offset[h + 1] - pattern.column_offset[h];
    EXPECT_GT(columns, 0);
    const double slashes = rows[h].budget - static_cast<double>(columns) / 64;
    // The last block of queries computes a block for each slash, and the sink block.
    std::int64_t blocks = 0;
    for (const BlockRun& run : runs_of(pattern, h, pattern.q_blocks() - 1))
      blocks += run.last - run.first;
    EXPECT_TRUE(slashes == static_cast<double>(blocks) ||
                slashes == static_cast<double>(blocks - 1))
        << "head " << h << ": budget " << rows[h].budget << ", " << columns << " columns, "
        << blocks << " blocks";
    EXPECT_EQ(rows[h].computed_pairs, work.counts().pairs(h));
    EXPECT_EQ(rows[h].visible_pairs, 640 * 641 / 2);
    EXPECT_EQ(rows[h].overflow, 0);
  }
}

}  // namespace
}  // namespace ballast
