// Causal selection of vertical-slash patterns: the choice by brute force, the same on any ring,
// layout and cut into chunks, attention under it, and that later tokens change nothing earlier.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "parallel/context/ring_attention.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"

namespace ballast {
namespace {

AttentionOptions causal_options(std::int64_t stretch) {
  AttentionOptions options = options_of("vertical_slash");
  options.selection = IndexSelection::causal;
  options.stretch = stretch;
  return options;
}

/// The fewest of `mass` that reach `share` of its sum, heaviest first; and the least gap that a
/// rounding of masses would have to close to choose others.
std::vector<char> top(const std::vector<double>& mass, double share, double& gap) {
  std::vector<std::size_t> order(mass.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return mass[a] > mass[b]; });
  const double all = std::accumulate(mass.begin(), mass.end(), 0.0);
  std::vector<char> chosen(mass.size(), 0);
  double sum = 0;
  std::size_t i = 0;
  for (; i < order.size() && (i == 0 || sum < share * all); ++i) {
    sum += mass[order[i]];
    chosen[order[i]] = 1;
  }
  gap = std::min(
      {gap, std::abs(sum - share * all), std::abs(sum - mass[order[i - 1]] - share * all)});
  if (i < order.size()) gap = std::min(gap, mass[order[i - 1]] - mass[order[i]]);
  return chosen;
}

/// By definition, in fp64: every stretch by the queries before it.  False in `sure` where rounding
/// could decide otherwise.
Mask by_definition(const Data& data, const AttentionOptions& options, Mask& sure) {
  const std::int64_t n = data.batch.axis_tokens();
  Mask mask(static_cast<std::size_t>(kHeads * n * n), 0);
  sure.assign(mask.size(), 1);
  for (std::size_t s = 0; s < data.batch.segments.size(); ++s) {
    const std::int64_t first = PackedAxis(data.batch).offset[s],
                       count = data.batch.segments[s].tokens(), width = options.stretch;
    for (std::int64_t h = 0; h < kHeads; ++h)
      for (std::int64_t a = 0; a < count; a += width) {
        std::vector<double> column(static_cast<std::size_t>(a), 0),
            slash(static_cast<std::size_t>(a / 64), 0);
        for (std::int64_t i = std::max<std::int64_t>(0, a - options.last_q); i < a; ++i) {
          double sum = 0;
          for (std::int64_t j = 0; j <= i; ++j)
            sum += std::exp(score(data.all, h, first + i, first + j));
          for (std::int64_t j = 0; j <= i; ++j) {
            const double p = std::exp(score(data.all, h, first + i, first + j)) / sum;
            column[j] += p;
            slash[i / 64 - j / 64] += p;
          }
        }
        double gap = 1;
        std::vector<char> columns, slashes;
        if (a > 0) {
          columns = top(column, options.vertical_share, gap);
          slashes = top(slash, options.slash_share, gap);
        }
        for (std::int64_t i = a; i < std::min(count, a + width); ++i)
          for (std::int64_t j = 0; j <= i; ++j) {
            const std::int64_t d = i / 64 - j / 64;
            const bool in = j >= a || j < 64 || d == 0 || columns[j] != 0 ||
                            (d < static_cast<std::int64_t>(slashes.size()) && slashes[d] != 0);
            mask[(h * n + first + i) * n + first + j] = in;
            sure[(h * n + first + i) * n + first + j] = gap > 1e-5;
          }
      }
  }
  return mask;
}

/// A chunk of one sample over all its keys so far, both padded to `padded`.
AttentionAxes chunk_axes(std::int64_t begin, std::int64_t end, std::int64_t padded) {
  AttentionAxes axes;
  axes.align = kBlock;
  axes.first_query = {begin};
  append(axes.queries, {0, begin, end - begin});
  append(axes.queries, {-1, 0, padded - end});
  AxisRanges keys{{0, 0, end}};
  append(keys, {-1, 0, padded - end});
  axes.keys = {keys};
  return axes;
}
AttentionInputs chunk_inputs(const AttentionInputs& all, std::int64_t begin, std::int64_t padded) {
  AttentionInputs in = all;
  in.q = all.q.rows(begin, padded);
  in.k = all.k.rows(0, padded);
  in.v = all.v.rows(0, padded);
  return in;
}

class Causal : public ::testing::Test {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{51};
};

TEST_F(Causal, ChosenByTheQueriesBeforeEachStretchOnAnyRingAndLayout) {
  SCOPED_TRACE(draw.trace());
  for (const std::int64_t stretch : {64, 192}) {
    const AttentionOptions options = causal_options(stretch);
    const Data data({300, 40, 577, 64}, options, draw);
    const std::int64_t n = data.batch.axis_tokens();
    Mask sure;
    const Mask defined = by_definition(data, options, sure), expected = alone(data, options);
    std::int64_t wrong = 0, compared = 0, left_out = 0;
    for (std::size_t i = 0; i < defined.size(); ++i) {
      compared += sure[i];
      wrong += sure[i] != 0 && defined[i] != expected[i];
    }
    for (std::int64_t s = 0; s < 4; ++s)
      for (std::int64_t i = 0; i < data.batch.segments[s].tokens(); ++i)
        for (std::int64_t j = 0; j <= i; ++j) {
          const std::int64_t at = PackedAxis(data.batch).offset[s];
          left_out += expected[(at + i) * n + at + j] == 0;
        }
    EXPECT_EQ(wrong, 0) << "of " << compared << " pairs, stretch " << stretch;
    EXPECT_GT(compared, static_cast<std::int64_t>(defined.size()) / 2);
    EXPECT_GT(left_out, 0) << "nothing is left out";
    for (const LayoutCase& l : kLayouts) {
      const SequenceLayout layout(l.kind, n, world.size(), l.stripe, options.align());
      const auto source = pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                         options, nullptr, nullptr);
      const AttentionInputs in = data.inputs(data.packed(layout, world.rank()), DType::f32);
      Mask mask(expected.size(), 0);
      mark(*source, source->shards(in), data, layout, mask);
      std::int64_t differ = 0;
      for (std::int64_t q : data.packed(layout, world.rank()))
        for (std::int64_t h = 0; h < kHeads; ++h)
          for (std::int64_t j = 0; j < n; ++j)
            differ += mask[(h * n + q) * n + j] != expected[(h * n + q) * n + j];
      EXPECT_EQ(differ, 0) << name(l.kind) << " " << l.stripe;
    }
  }
}

/// Output and gradients of ring attention against the definition under the mask.
TEST_F(Causal, AttentionAndGradientsUnderTheMask) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = causal_options(64);
  Data data({330, 200}, options, draw);
  data.all.mask = alone(data, options);
  data.all.run();
  const std::int64_t n = data.batch.axis_tokens();
  for (int outer = 1; outer <= world.size(); outer *= 2) {
    const RingGroup group{world, plan_ring(world.rank(), outer, world.size() / outer)};
    const LayoutCase l = kLayouts[outer % 3];
    const SequenceLayout layout(l.kind, n, world.size(), l.stripe, options.align());
    const auto at = data.packed(layout, world.rank());
    RingAttention attention(group,
                            pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                           options, nullptr, nullptr),
                            nullptr);
    const AttentionInputs in = data.inputs(at, DType::f64);
    const auto like = [](const Tensor& t) { return Tensor::zeros(t.shape(), t.dtype()); };
    Tensor o = like(in.q), lse = Tensor::zeros({kHeads, in.q.size(0)}, DType::f64),
           d_o = data.rows(data.all.d_o, kHeads, at, DType::f64), dq = like(in.q), dk = like(in.k),
           dv = like(in.v);
    attention.forward(in, o, lse);
    attention.backward(in, o, lse, d_o, dq, dk, dv);
    const auto error = [&](const Tensor& got, const std::vector<double>& expected,
                           std::int64_t heads) {
      return testing::relative_error(testing::elements(got),
                                     testing::elements(data.rows(expected, heads, at, DType::f64)));
    };
    EXPECT_LT(error(o, data.all.o, kHeads), 1e-10) << outer;
    EXPECT_LT(error(dq, data.all.dq, kHeads), 1e-10) << outer;
    EXPECT_LT(error(dk, data.all.dk, kKvHeads), 1e-10) << outer;
    EXPECT_LT(error(dv, data.all.dv, kKvHeads), 1e-10) << outer;
  }
}

/// Chunks of whole stretches choose what the whole sample would.
TEST_F(Causal, DependentChunksChooseAsTheWholeSample) {
  SCOPED_TRACE(draw.trace());
  for (const std::int64_t chunk : {64, 128, 256}) {
    const AttentionOptions options = causal_options(64);
    const Data data({700}, options, draw);
    const std::int64_t n = data.batch.axis_tokens();
    const Mask expected = alone(data, options);
    const AttentionInputs all = data.inputs(
        data.packed(SequenceLayout(LayoutKind::contiguous, n, 1, 64, 64), 0), DType::f32);
    const auto carry = std::make_shared<SlashCarry>();
    for (std::int64_t begin = 0; begin < 700; begin += chunk) {
      const std::int64_t end = std::min<std::int64_t>(700, begin + chunk),
                         padded = std::min(n, begin + chunk);
      const auto source = pattern_source(Communicator(), chunk_axes(begin, end, padded), options,
                                         nullptr, nullptr, {}, carry);
      const PatternArrays& x =
          source->shards(chunk_inputs(all, begin, padded)).front().host()->arrays();
      ASSERT_EQ(problems(x), "");
      std::int64_t differ = 0;
      for (std::int64_t h = 0; h < kHeads; ++h)
        for (std::int64_t i = begin; i < end; ++i)
          for (std::int64_t j = 0; j < padded; ++j)
            differ += computed(x, static_cast<int>(h), i - begin, j) !=
                      (expected[(h * n + i) * n + j] != 0);
      EXPECT_EQ(differ, 0) << "chunk of " << chunk << " at " << begin;
    }
  }
}

/// A choice that is handed on counts with the queries that go by it, whole or in chunks; one at a
/// sample's end has none.
TEST_F(Causal, WhatCapsLeaveOutIsTheSameInChunks) {
  SCOPED_TRACE(draw.trace());
  AttentionOptions options = causal_options(64);
  options.vertical_share = options.slash_share = 0.9;
  options.max_columns = 10, options.max_slashes = 2;
  for (const std::int64_t tokens : {700, 640}) {
    const Data data({tokens}, options, draw);
    const std::int64_t n = data.batch.axis_tokens();
    const SequenceLayout layout(LayoutKind::contiguous, n, 1, 64, 64);
    const AttentionInputs all = data.inputs(data.packed(layout, 0), DType::f32);
    Recorder recorder;
    recorder.enabled = true;
    pattern_source(Communicator(), attention_axes(data.batch, layout, 0), options, nullptr,
                   &recorder)
        ->shards(all);
    const std::vector<BudgetRow> whole = recorder.take_budgets();
    ASSERT_EQ(whole.size(), static_cast<std::size_t>(kHeads));
    for (const std::int64_t chunk : {64, 128, 256}) {
      std::vector<std::int64_t> overflow(kHeads, 0);
      std::vector<double> mass(kHeads, 0);
      const auto carry = std::make_shared<SlashCarry>();
      for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
        const std::int64_t end = std::min(tokens, begin + chunk),
                           padded = std::min(n, begin + chunk);
        pattern_source(Communicator(), chunk_axes(begin, end, padded), options, nullptr, &recorder,
                       {}, carry)
            ->shards(chunk_inputs(all, begin, padded));
        for (const BudgetRow& row : recorder.take_budgets()) {
          overflow.at(row.head) += row.overflow;
          mass.at(row.head) +=
              row.overflow_mass * static_cast<double>(end - begin) / static_cast<double>(tokens);
        }
      }
      for (const BudgetRow& row : whole) {
        EXPECT_GT(row.overflow, 0) << "no cap decided";
        EXPECT_GT(row.overflow_mass, 0);
        EXPECT_EQ(overflow.at(row.head), row.overflow) << tokens << " in chunks of " << chunk;
        EXPECT_NEAR(mass.at(row.head), row.overflow_mass, 1e-9) << tokens << " by " << chunk;
      }
    }
  }
}

TEST_F(Causal, AChunkThatStartsInsideAStretchIsRefused) {
  const AttentionOptions options = causal_options(128);
  AttentionAxes axes;
  axes.align = kBlock;
  axes.first_query = {64};
  axes.queries = {{0, 64, 64}};
  axes.keys = {{{0, 0, 128}}};
  AttentionInputs in;
  in.q = Tensor::zeros({64, kHeads, kDim}, DType::f32);
  in.k = in.v = Tensor::zeros({128, kKvHeads, kDim}, DType::f32);
  const auto source = pattern_source(Communicator(), axes, options, nullptr, nullptr, {},
                                     std::make_shared<SlashCarry>());
  EXPECT_THROW(source->shards(in), Error);
}

/// Queries, keys and values from t on are drawn anew; outputs before t keep every bit where the
/// choice is causal.
TEST_F(Causal, OutputsBeforeACutKeepEveryBit) {
  SCOPED_TRACE(draw.trace());
  // A block of 64 queries computes the tiles that any of them chose, in an order that decides last
  // bits: MoBA's cut is one of blocks.
  struct Case {
    const char* pattern;
    bool causal, holds;
    std::int64_t cut;
  };
  for (const Case& x :
       {Case{"dense", false, true, 421}, Case{"moba", false, true, 448},
        Case{"vertical_slash", true, true, 421}, Case{"vertical_slash", false, false, 421}}) {
    AttentionOptions options = options_of(x.pattern);
    if (x.causal) options = causal_options(128);
    Data data({900}, options, draw);
    const std::int64_t n = data.batch.axis_tokens(), cut = x.cut;
    const SequenceLayout layout(LayoutKind::zigzag, n, world.size(), 64, options.align());
    const auto at = data.packed(layout, world.rank());
    const auto output = [&] {
      const AttentionAxes axes = attention_axes(data.batch, layout, world.rank());
      const RingGroup group{world, plan_ring(world.rank(), 1, world.size())};
      RingAttention attention(group, pattern_source(world, axes, options, nullptr, nullptr),
                              nullptr);
      const AttentionInputs in = data.inputs(at, DType::f64);
      Tensor o = Tensor::zeros(in.q.shape(), DType::f64),
             lse = Tensor::zeros({kHeads, in.q.size(0)}, DType::f64);
      attention.forward(in, o, lse);
      return testing::elements(o);
    };
    const auto before = output();
    for (auto* values : {&data.all.q, &data.all.k, &data.all.v}) {
      const std::int64_t width = static_cast<std::int64_t>(values->size()) / n;
      const std::vector<double> fresh = draw.normals((n - cut) * width);
      for (std::size_t i = 0; i < fresh.size(); ++i)
        (*values)[static_cast<std::size_t>(cut * width) + i] = static_cast<float>(fresh[i]);
    }
    const auto after = output();
    std::int64_t earlier = 0, later = 0;
    for (std::size_t i = 0; i < before.size(); ++i)
      (at[i / (kHeads * kDim)] < cut ? earlier : later) += before[i] != after[i];
    earlier = world.all_reduce(earlier);
    EXPECT_GT(world.all_reduce(later), 0);
    if (x.holds)
      EXPECT_EQ(earlier, 0) << x.pattern;
    else
      EXPECT_GT(earlier, 0) << x.pattern << ": the choice does not look at the end";
  }
}

}  // namespace
}  // namespace ballast
