// Budgets of sparse patterns: what they are weighed by, and what is reported.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/predict/sparsity_tuning.hpp"
#include "parallel/pattern/pattern_source.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"
#include "tests/parallel/pattern/stated_budget.hpp"

namespace ballast {
namespace {

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

/// Segments of a micro-batch that are dependent chunks, whole samples and a short one, on one rank;
/// heads look at their surroundings, at the first keys and at some of their own.
struct Chunks {
  AttentionAxes axes;
  AttentionInputs in;
  std::vector<std::int64_t> first_key;  ///< [segments] on the key axis

  explicit Chunks(SharedDraw& draw) {
    axes.align = kBlock;
    axes.first_query = {512, 0, 320, 0};
    const std::int64_t ends[] = {803, 900, 384, 40};  // neither is the window one block, nor full
    AxisRanges stored;
    for (std::int32_t s = 0; s < 4; ++s) {
      first_key.push_back(token_count(stored));
      const std::int64_t padding = (kBlock - ends[s] % kBlock) % kBlock;
      append(axes.queries, {s, axes.first_query[s], ends[s] - axes.first_query[s]});
      append(stored, {s, 0, ends[s]});
      append(axes.queries, {-1, 0, padding});
      append(stored, {-1, 0, padding});
    }
    axes.keys = {stored};
    const std::int64_t queries = token_count(axes.queries), keys = token_count(stored);
    in.scale = 0.6;
    in.q = random_rows(draw, queries, kHeads);
    in.k = in.v = random_rows(draw, keys, kKvHeads);
    // Neighbours and some keys attract.
    float* k = in.k.data<float>();
    const auto at = [](std::int64_t i) { return 0.05f * static_cast<float>(i); };
    std::int64_t row = 0;
    for (const AxisRange& range : axes.queries)
      for (std::int64_t i = 0; i < range.count; ++i, ++row)
        for (std::int64_t h = 0; h < kHeads && !range.padding(); ++h) {
          float* q = in.q.data<float>() + (row * kHeads + h) * kDim;
          q[0] = 3 * std::cos(at(range.position + i));
          q[1] = 3 * std::sin(at(range.position + i));
        }
    row = 0;
    for (const AxisRange& range : axes.keys[0])
      for (std::int64_t i = 0; i < range.count; ++i, ++row)
        for (std::int64_t h = 0; h < kKvHeads; ++h) {
          float* key = k + (row * kKvHeads + h) * kDim;
          key[0] = 2 * std::cos(at(range.position + i));
          key[1] = 2 * std::sin(at(range.position + i));
          if (draw.integer(0, 40) == 0) key[2] += 4;
        }
  }

  /// Mean over queries and heads of the share of the observed queries' softmax that `pattern`
  /// computes, pair by pair in fp64.
  double held(const AttentionPattern& pattern, std::int64_t last_q) const {
    double sum = 0, weights = 0;
    std::int64_t row = 0;
    for (const AxisRange& range : axes.queries) {
      if (!range.padding()) {
        const std::int64_t first =
            range.end() <= last_q ? range.end() : std::max(range.position, range.end() - last_q);
        for (std::int64_t h = 0; h < kHeads; ++h) {
          double of_rows = 0;
          for (std::int64_t p = first; p < range.end(); ++p)
            of_rows += held(pattern, h, row + p - range.position, first_key[range.segment], p + 1);
          const auto rows = static_cast<double>(range.end() - first);
          sum += static_cast<double>(range.count) * (rows > 0 ? of_rows / rows : 1);
          weights += static_cast<double>(range.count);
        }
      }
      row += range.count;
    }
    return sum / weights;
  }

 private:
  double held(const AttentionPattern& pattern, std::int64_t h, std::int64_t row, std::int64_t first,
              std::int64_t keys) const {
    double inside = 0, all = 0;
    const float* q = in.q.data<float>() + (row * kHeads + h) * kDim;
    for (std::int64_t j = first; j < first + keys; ++j) {
      const float* k = in.k.data<float>() + (j * kKvHeads + h / (kHeads / kKvHeads)) * kDim;
      double dot = 0;
      for (std::int64_t d = 0; d < kDim; ++d) dot += static_cast<double>(q[d]) * k[d];
      const double e = std::exp(in.scale * dot);
      all += e;
      if (computed(pattern, static_cast<int>(h), row, j)) inside += e;
    }
    return inside / all;
  }
};

TEST(PatternBudgets, CoverageToldIsHeldByEveryBudgetsPattern) {
  SharedDraw draw{47};
  SCOPED_TRACE(draw.trace());
  for (const std::int64_t last_q : {48, 100}) {
    AttentionOptions options = vertical_slash_options();
    options.last_q = last_q;
    const Chunks chunks(draw);
    std::vector<double> told;
    const std::vector<std::int64_t> candidates{1, 2, 3, 4, 6, 9, 14};
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      Stated policy(candidates[c]);
      const auto source = pattern_source(Communicator(), chunks.axes, options, &policy, nullptr);
      const AttentionWork work = source->shards(chunks.in).front();
      told = policy.coverage;
      EXPECT_NEAR(told[c], chunks.held(*work.host(), last_q), 1e-4)
          << "budget " << candidates[c] << ", last_q " << last_q;
    }
    EXPECT_LT(told.front(), 0.8);
    EXPECT_GT(told.back(), told.front() + 0.1);
  }
}

/// Equation 5 on what is computed: a straggler loses at most p of the observed rows' attention.
TEST(PatternBudgets, ALoweredBudgetKeepsTheBoundOnTheObservedRows) {
  SharedDraw draw{53};
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = vertical_slash_options();
  int lowered = 0;
  for (const double p : {0.02, 0.05, 0.1, 0.2}) {
    const Chunks chunks(draw);
    DstOptions dst;
    dst.threshold = p;
    dst.base_budget = 12;
    dst.candidates = {1, 2, 3, 4, 5, 6, 8, 10, 12};
    const auto held_at = [&](BudgetPolicy& policy) {
      const auto source = pattern_source(Communicator(), chunks.axes, options, &policy, nullptr);
      return chunks.held(*source->shards(chunks.in).front().host(), options.last_q);
    };
    DstPolicy tuned(dst, TuningTarget{12, 1, true});
    FixedBudget base(12);
    const double before = held_at(base), after = held_at(tuned);
    const DstPolicy::Choice choice = tuned.choices().front();
    EXPECT_LE(before - after, p + 1e-3) << "budget " << choice.budget;
    EXPECT_NEAR(choice.coverage_loss, before - after, 1e-3);
    lowered += choice.budget < dst.base_budget;
  }
  EXPECT_GT(lowered, 0);
}

TEST(PatternBudgets, CurvesOfMeasuredStepsAreRecorded) {
  SharedDraw draw{59};
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = vertical_slash_options();
  options.recall_every = 5;
  const Chunks chunks(draw);
  for (const std::int32_t step : {4, 5}) {
    Recorder recorder;
    recorder.enabled = true;
    recorder.context.step = step;
    Stated policy(3);
    pattern_source(Communicator(), chunks.axes, options, &policy, &recorder)->shards(chunks.in);
    const std::vector<CoverageRow> rows = recorder.take_coverage();
    ASSERT_EQ(rows.size(), step == 5 ? policy.coverage.size() : 0);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].step, 5);
      EXPECT_EQ(rows[i].budget, policy.candidates()[i]);
      EXPECT_EQ(rows[i].coverage, policy.coverage[i]);
      EXPECT_EQ(rows[i].chosen, rows[i].budget == 3);
    }
  }
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

/// Budgets of the heads, as one row each says them.
std::vector<double> reported(const Communicator& group, const AttentionAxes& axes,
                             const AttentionOptions& options, const AttentionInputs& in) {
  Recorder recorder;
  recorder.enabled = true;
  pattern_source(group, axes, options, nullptr, &recorder)->shards(in);
  std::vector<double> budgets;
  for (const BudgetRow& row : recorder.take_budgets()) budgets.push_back(row.budget);
  return budgets;
}

TEST(PatternBudgets, ReportedBudgetsAreTheSameOnAnyNumberOfRanks) {
  const Communicator world = Communicator::world();
  SharedDraw draw{43};
  SCOPED_TRACE(draw.trace());
  for (const char* pattern : {"vertical_slash", "xattention", "flexprefill", "by_head", "moba"}) {
    const AttentionOptions options = options_of(pattern);
    const Data data({700, 40, 333}, options, draw);
    const auto budgets = [&](const Communicator& group, const SequenceLayout& layout) {
      return reported(group, attention_axes(data.batch, layout, group.rank()), options,
                      data.inputs(data.packed(layout, group.rank()), DType::f32));
    };
    const std::int64_t n = data.batch.axis_tokens();
    const SequenceLayout whole(LayoutKind::contiguous, n, 1, 64, options.align()),
        dealt(LayoutKind::striped, n, world.size(), 128, options.align());
    const std::vector<double> one = budgets(Communicator(), whole), many = budgets(world, dealt);
    ASSERT_EQ(one.size(), static_cast<std::size_t>(kHeads)) << pattern;
    ASSERT_EQ(many.size(), one.size()) << pattern;
    for (std::size_t h = 0; h < one.size(); ++h) {
      EXPECT_GT(one[h], 0);
      EXPECT_NEAR(many[h], one[h], 1e-12) << pattern << ", head " << h;
    }
  }
}

// Of a pack: the mean of what each of its samples has alone, by their tokens.
TEST(PatternBudgets, ReportedBudgetsWeighSamplesByTheirTokens) {
  SharedDraw draw{44};
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of("vertical_slash");
  const Data data({900, 150, 333}, options, draw);
  const PackedAxis packed(data.batch);
  const auto budgets = [&](const MicroBatch& batch, std::int64_t first) {
    const SequenceLayout layout(LayoutKind::contiguous, batch.axis_tokens(), 1, 64,
                                options.align());
    std::vector<std::int64_t> at(static_cast<std::size_t>(batch.axis_tokens()));
    std::iota(at.begin(), at.end(), first);
    return reported(Communicator(), attention_axes(batch, layout, 0), options,
                    data.inputs(at, DType::f32));
  };
  std::vector<double> mean(static_cast<std::size_t>(kHeads), 0);
  for (std::size_t s = 0; s < data.batch.segments.size(); ++s) {
    const Segment& segment = data.batch.segments[s];
    const std::vector<double> alone =
        budgets({{segment}, 1, -1, options.align()}, packed.offset[s]);
    ASSERT_EQ(alone.size(), mean.size());
    for (std::size_t h = 0; h < mean.size(); ++h)
      mean[h] += alone[h] * static_cast<double>(segment.tokens()) / (900 + 150 + 333);
  }
  const std::vector<double> together = budgets(data.batch, 0);
  ASSERT_EQ(together.size(), mean.size());
  for (std::size_t h = 0; h < mean.size(); ++h) EXPECT_NEAR(together[h], mean[h], 1e-9);
}

}  // namespace
}  // namespace ballast
