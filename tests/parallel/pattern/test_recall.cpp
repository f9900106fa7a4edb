// Recall of sparse patterns: sampled queries against brute force over the mask, on any ranks,
// rings, layouts and heads; the printed interval; dependent chunks.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "parallel/context/ring_attention.hpp"
#include "parallel/pattern/recall.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"

namespace ballast {
namespace {

constexpr int kLayer = 3;  // of Data::inputs

/// Share of a query's softmax on pairs of the mask, in fp64.
double share(const Data& data, const Mask& mask, std::int64_t h, std::int64_t first,
             std::int64_t position) {
  const std::int64_t n = data.batch.axis_tokens(), i = first + position;
  double in = 0, all = 0;
  for (std::int64_t j = first; j <= i; ++j) {
    const double e = std::exp(score(data.all, h, i, j));
    all += e;
    if (mask[(h * n + i) * n + j] != 0) in += e;
  }
  return in / all;
}

AttentionOptions measured_options(const std::string& pattern, std::int64_t rows) {
  AttentionOptions options = options_of(pattern);
  options.recall_every = 5;
  options.recall_rows = rows;
  options.recall_seed = 9;
  return options;
}

Recorder recorder_at(std::int32_t step) {
  Recorder recorder;
  recorder.enabled = true;
  recorder.context.step = step;
  recorder.context.micro_batch = 1;
  return recorder;
}

class Recall : public ::testing::TestWithParam<const char*> {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{61};

  /// What the rows of step 10 have to be, by head.
  static std::map<int, double> expected(const Data& data, const AttentionOptions& options,
                                        const Mask& mask) {
    const SequenceLayout flat(LayoutKind::contiguous, data.batch.axis_tokens(), 1, 64,
                              options.align());
    const AttentionAxes axes = attention_axes(data.batch, flat, 0);
    const auto sampled = sample_queries(axes, key_axis(axes), options.recall_rows, options.last_q,
                                        options.recall_seed, 10, kLayer);
    const PackedAxis packed(data.batch);
    std::map<int, double> means;
    for (int h = 0; h < kHeads; ++h) {
      double sum = 0, weights = 0;
      for (const SampledQuery& q : sampled) {
        sum += q.weight * share(data, mask, h, packed.offset[q.segment], q.position);
        weights += q.weight;
      }
      means[h] = sum / weights;
    }
    return means;
  }
  static void compare(const std::vector<RecallRow>& rows, const std::map<int, double>& means,
                      double tolerance, int heads = kHeads) {
    ASSERT_EQ(static_cast<int>(rows.size()), heads);
    for (const RecallRow& row : rows) {
      EXPECT_EQ(row.layer, kLayer);
      EXPECT_EQ(row.step, 10);
      EXPECT_EQ(row.micro_batch, 1);
      EXPECT_NEAR(row.mean, means.at(row.head), tolerance) << "head " << row.head;
      EXPECT_NEAR(row.sink + row.own + row.blocks + row.columns, row.mean, 1e-9);
      EXPECT_LE(row.low, row.mean + 1e-12);
    }
  }
};

TEST_P(Recall, IsThatOfBruteForceOnAnyRanksRingsAndLayouts) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = measured_options(GetParam(), 20);
  const Data data({700, 40, 333}, options, draw);
  const Mask mask = alone(data, options);
  const std::map<int, double> means = expected(data, options, mask);
  EXPECT_LT(means.at(0), 0.99);
  for (int outer = 1; outer <= world.size(); ++outer) {
    if (world.size() % outer != 0) continue;
    for (const LayoutCase& l : kLayouts) {
      if (deals_stripes(l.kind) && l.stripe % options.align() != 0) continue;
      for (const DType type : {DType::f32, DType::f64}) {
        const RingGroup group{world, plan_ring(world.rank(), outer, world.size() / outer)};
        const SequenceLayout layout(l.kind, data.batch.axis_tokens(), world.size(), l.stripe,
                                    options.align());
        Recorder recorder = recorder_at(10);
        RingAttention attention(
            group,
            pattern_source(world, attention_axes(data.batch, layout, world.rank()), options,
                           nullptr, &recorder),
            nullptr);
        const AttentionInputs in = data.inputs(data.packed(layout, world.rank()), type);
        Tensor o = Tensor::zeros(in.q.shape(), type),
               lse = Tensor::zeros({kHeads, in.q.size(0)}, type == DType::f64 ? type : DType::f32);
        attention.forward(in, o, lse);
        attention.forward(in, o, lse);  // of a recomputation: not measured again
        compare(recorder.take_recalls(), means, type == DType::f64 ? 1e-9 : 1e-4);
      }
    }
  }
}

TEST_P(Recall, HeadsOfUlyssesRanksAreThoseOfTheLayer) {
  if (world.size() % 2 != 0) GTEST_SKIP() << "needs pairs of ranks";
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = measured_options(GetParam(), 20);
  const Data data({700, 333}, options, draw);
  const std::map<int, double> means = expected(data, options, alone(data, options));
  const Communicator sp = world.split(world.rank() / 2, world.rank()),
                     cp = world.split(world.rank() % 2, world.rank());
  const SequenceLayout layout(LayoutKind::zigzag, data.batch.axis_tokens(), cp.size(), 64,
                              options.align());
  const AttentionInputs all = data.inputs(data.packed(layout, cp.rank()), DType::f32);
  const std::int64_t heads = kHeads / 2, kv_heads = kKvHeads / 2;
  const auto part = [&](const Tensor& from, std::int64_t count) {
    Tensor to = Tensor::empty({from.size(0), count, kDim}, DType::f32);
    for (std::int64_t i = 0; i < from.size(0); ++i)
      std::copy_n(from.data<float>() + (i * from.size(1) + sp.rank() * count) * kDim, count * kDim,
                  to.data<float>() + i * count * kDim);
    return to;
  };
  AttentionInputs in = all;
  in.q = part(all.q, heads);
  in.k = in.v = part(all.k, kv_heads);
  Recorder recorder = recorder_at(10);
  pattern_source(cp, attention_axes(data.batch, layout, cp.rank()), options, nullptr, &recorder, sp)
      ->shards(in);
  const std::vector<RecallRow> rows = recorder.take_recalls();
  compare(rows, means, 1e-4, static_cast<int>(heads));
  EXPECT_EQ(rows.front().head, sp.rank() * heads);
}

TEST_P(Recall, TheMeanOfAllQueriesLiesInTheInterval) {
  if (world.size() > 1) GTEST_SKIP() << "a figure of one rank";
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = measured_options(GetParam(), 24);
  options.recall_every = 1;
  const Data data({700, 333}, options, draw);
  const Mask mask = alone(data, options);
  const PackedAxis packed(data.batch);
  std::vector<double> truth;
  for (int h = 0; h < kHeads; ++h) {
    double sum = 0;
    for (int s = 0; s < 2; ++s)
      for (std::int64_t p = 0; p < data.batch.segments[s].tokens(); ++p)
        sum += share(data, mask, h, packed.offset[s], p);
    truth.push_back(sum / 1033);
  }
  const SequenceLayout flat(LayoutKind::contiguous, data.batch.axis_tokens(), 1, 64,
                            options.align());
  const auto rows_at = [&](std::int32_t step) {
    Recorder recorder = recorder_at(step);
    pattern_source(Communicator(), attention_axes(data.batch, flat, 0), options, nullptr, &recorder)
        ->shards(data.inputs(data.packed(flat, 0), DType::f32));
    return recorder.take_recalls();
  };
  int inside = 0, all = 0;
  for (std::int32_t step = 0; step < 25; ++step)
    for (const RecallRow& row : rows_at(step)) {
      ++all;
      inside += std::abs(row.mean - truth[row.head]) <= 1.96 * row.error;
      EXPECT_EQ(row.rows, 48);
      EXPECT_EQ(row.queries, 1033);
      EXPECT_LT(row.error, 0.1);
    }
  EXPECT_GE(inside, all * 9 / 10) << "of " << all;
  options.recall_rows = 1000;
  for (const RecallRow& row : rows_at(0)) {
    EXPECT_NEAR(row.mean, truth[row.head], 1e-4);
    EXPECT_EQ(row.error, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Recall, ::testing::Values("vertical_slash", "moba", "xattention"),
                         [](const auto& info) { return std::string(info.param); });

TEST(RecallOfChunks, AQueryOfADependentChunkSeesStoredKeys) {
  SharedDraw draw{67};
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = measured_options("vertical_slash", 30);
  const Data data({832}, options, draw);
  // The last 192 queries alone, over all keys.
  AttentionAxes axes;
  axes.align = kBlock;
  axes.first_query = {640};
  axes.queries = {{0, 640, 192}};
  axes.keys = {{{0, 0, 832}}};
  std::vector<std::int64_t> at(192);
  for (std::int64_t i = 0; i < 192; ++i) at[i] = 640 + i;
  AttentionInputs in = data.inputs(at, DType::f64);
  std::vector<std::int64_t> keys(832);
  for (std::int64_t j = 0; j < 832; ++j) keys[j] = j;
  in.k = in.v = data.inputs(keys, DType::f64).k;
  Recorder recorder = recorder_at(10);
  const auto source = pattern_source(Communicator(), axes, options, nullptr, &recorder);
  const AttentionWork work = source->shards(in).front();
  Mask mask(static_cast<std::size_t>(kHeads * 832 * 832), 0);
  for (int h = 0; h < kHeads; ++h)
    for (std::int64_t i = 0; i < 192; ++i)
      for (std::int64_t j = 0; j < 832; ++j)
        mask[(h * 832 + 640 + i) * 832 + j] = computed(*work.host(), h, i, j);
  const auto sampled = sample_queries(axes, key_axis(axes), 30, options.last_q, 9, 10, kLayer);
  ASSERT_EQ(sampled.size(), 30u);
  const std::vector<RecallRow> rows = recorder.take_recalls();
  ASSERT_EQ(rows.size(), static_cast<std::size_t>(kHeads));
  for (const RecallRow& row : rows) {
    double sum = 0;
    for (const SampledQuery& q : sampled) {
      EXPECT_GE(q.position, 640);
      sum += q.weight * share(data, mask, row.head, 0, q.position);
    }
    EXPECT_NEAR(row.mean, sum / 192, 1e-9);
  }
}

// Hand-worked: variances of the shares, and what is left of them by how many queries were drawn.
TEST(RecallOfSamples, WhatIsDrawnWholeHasNoError) {
  const std::vector<double> shares{0.1, 0.5, 0.9};
  const auto error = [&](double weight) {
    const std::vector<SampledQuery> drawn{{0, 0, weight}, {0, 1, weight}, {0, 2, weight}};
    const Estimate found = estimate(drawn, shares);
    EXPECT_NEAR(found.mean, 0.5, 1e-12);
    return found.error;
  };
  EXPECT_EQ(error(1), 0);
  const double variance = 2 * 0.16 / 3 / 2;  // squares / n / (n - 1)
  EXPECT_NEAR(error(2), std::sqrt(variance * 0.5), 1e-12);
  EXPECT_NEAR(error(1e9), std::sqrt(variance), 1e-9);
}

TEST(RecallSteps, DrawsFollowTheSampleAndNotItsPlace) {
  SharedDraw draw{72};
  const AttentionOptions options = measured_options("moba", 8);
  const Data data({500, 700, 500}, options, draw);
  const SequenceLayout flat(LayoutKind::contiguous, data.batch.axis_tokens(), 1, 64,
                            options.align());
  const AttentionAxes axes = attention_axes(data.batch, flat, 0);
  // [segment] positions drawn.
  const auto drawn = [&](const std::vector<std::uint64_t>& names) {
    std::vector<std::vector<std::int64_t>> positions(3);
    for (const SampledQuery& q : sample_queries(axes, key_axis(axes), 8, 64, 9, 10, kLayer, names))
      positions[static_cast<std::size_t>(q.segment)].push_back(q.position);
    return positions;
  };
  const auto first = drawn({5, 6, 7}), turned = drawn({7, 6, 5});
  EXPECT_EQ(first[0], turned[2]);
  EXPECT_EQ(first[2], turned[0]);
  EXPECT_EQ(first[1], turned[1]);
  EXPECT_NE(first[0], first[2]) << "samples of one length look at unlike queries";
  EXPECT_THROW(drawn({5, 6}), Error);
}

TEST(RecallSteps, OnlyEveryNthStepIsMeasured) {
  SharedDraw draw{71};
  const AttentionOptions options = measured_options("moba", 8);
  const Data data({500}, options, draw);
  const SequenceLayout flat(LayoutKind::contiguous, data.batch.axis_tokens(), 1, 64,
                            options.align());
  for (const std::int32_t step : {-1, 0, 1, 4, 5}) {
    Recorder recorder = recorder_at(step);
    pattern_source(Communicator(), attention_axes(data.batch, flat, 0), options, nullptr, &recorder)
        ->shards(data.inputs(data.packed(flat, 0), DType::f32));
    EXPECT_EQ(recorder.take_recalls().empty(), step < 0 || step % 5 != 0) << step;
  }
}

}  // namespace
}  // namespace ballast
