// Host attention, forward and backward, against the pair-by-pair reference on fresh random data.
#include <gtest/gtest.h>

#include <cstring>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "kernels/attention/attention.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/kernels/attention/test_attention_reference.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

using test::AttentionCase;
using test::AttentionResult;
using test::make_rows;
using test::relative_error;
using test::values_of;

double tolerance(DType type) { return type == DType::f64 ? 1e-12 : 4e-6; }

/// The kernel on the operands of a case, as slices of wider buffers when `slack_heads` > 0.
/// Gradients start at `start` and are added to; dense ones that start at 0 are NaN before and
/// overwritten.
AttentionResult run_kernel(const AttentionCase& c, int slack_heads = 0, double start = 0) {
  const auto tq = static_cast<std::int64_t>(c.queries.size()),
             tk = static_cast<std::int64_t>(c.keys.size());
  const Tensor q = make_rows(c.q, tq, c.q_heads, c.head_dim, c.type, slack_heads),
               k = make_rows(c.k, tk, c.kv_heads, c.head_dim, c.type, slack_heads);
  const Tensor v = make_rows(c.v, tk, c.kv_heads, c.head_dim, c.type, 2 * slack_heads),
               d_o = make_rows(c.d_o, tq, c.q_heads, c.head_dim, c.type, slack_heads);
  const bool adds = slack_heads > 0 || start != 0;
  if (!adds) start = std::nan("");
  const std::vector<double> q_start(c.q_size(), start), k_start(c.k_size(), start),
      nan(c.q_size(), std::nan(""));
  Tensor o = make_rows(nan, tq, c.q_heads, c.head_dim, c.type, slack_heads);
  Tensor lse = Tensor::empty({c.q_heads, tq}, c.type),
         delta = Tensor::empty({c.q_heads, tq}, c.type);
  attention_forward(AttentionPattern(c.index), q, k, v, c.scale, o, lse);
  attention_delta(o, d_o, delta);
  Tensor dq = make_rows(q_start, tq, c.q_heads, c.head_dim, c.type, slack_heads);
  Tensor dk = make_rows(k_start, tk, c.kv_heads, c.head_dim, c.type, slack_heads),
         dv = make_rows(k_start, tk, c.kv_heads, c.head_dim, c.type, slack_heads);
  attention_backward(AttentionPattern(c.index), q, k, v, c.scale, lse, delta, d_o, dq, dk, dv,
                     {.dq = adds, .dkv = adds});
  return {values_of(o), values_of(lse), values_of(dq), values_of(dk), values_of(dv)};
}

void expect_close(const AttentionResult& got, const AttentionResult& expected, double tolerance) {
  EXPECT_LE(relative_error(got.o, expected.o), tolerance) << "o";
  EXPECT_LE(relative_error(got.lse, expected.lse), tolerance) << "lse";
  // Differences of terms of order one, whose rounding is left where they cancel: under one visible
  // key both are zero.
  EXPECT_LE(relative_error(got.dq, expected.dq, 1), 2 * tolerance) << "dq";
  EXPECT_LE(relative_error(got.dk, expected.dk, 1), 2 * tolerance) << "dk";
  EXPECT_LE(relative_error(got.dv, expected.dv), 2 * tolerance) << "dv";
}

std::vector<AxisToken> axis(const std::vector<std::pair<std::int64_t, std::int64_t>>& segments) {
  std::vector<AxisToken> tokens;
  for (std::size_t s = 0; s < segments.size(); ++s)
    for (std::int64_t p = segments[s].first; p < segments[s].second; ++p)
      tokens.push_back({static_cast<std::int32_t>(s), p});
  return tokens;
}

enum class Pattern { dense, runs, row_masks, columns, runs_and_columns };

/// Replaces the dense runs by a random pattern.  Some query blocks stay without runs.
void set_pattern(AttentionCase& c, Pattern pattern, bool per_head, std::mt19937_64& random) {
  PatternArrays& x = c.index;
  if (pattern == Pattern::dense) {
    if (!per_head) return;
    x = listed(AttentionPattern(x));
    x.index_heads = c.q_heads;
    const auto runs = x.runs;
    const auto offset = x.run_offset;
    for (int h = 1; h < c.q_heads; ++h) {
      for (std::size_t b = 1; b < offset.size(); ++b)
        x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()) + offset[b]);
      x.runs.insert(x.runs.end(), runs.begin(), runs.end());
    }
    return;
  }
  x.index_heads = per_head ? c.q_heads : 1;
  x.dense = false;
  x.run_offset.assign(1, 0);
  for (int h = 0; h < x.index_heads; ++h)
    for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
      for (std::int32_t k = 0; pattern != Pattern::columns && b % 3 != 2;) {
        const std::int32_t first = k + static_cast<std::int32_t>(random() % 3),
                           last = first + 1 + static_cast<std::int32_t>(random() % 3);
        if (last > x.k_blocks()) break;
        if (pattern == Pattern::row_masks) {
          const std::uint64_t mask = random();
          for (std::uint64_t rows : {mask, ~mask & random(), std::uint64_t{0}}) {
            x.runs.push_back({first, last, static_cast<std::int32_t>(x.row_masks.size())});
            x.row_masks.push_back(rows);
          }
        } else {
          x.runs.push_back({first, last, -1});
        }
        k = last;
      }
      x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    }
  if (pattern == Pattern::columns || pattern == Pattern::runs_and_columns) {
    x.segments = 1 + static_cast<int>(random() % 2);
    for (std::int64_t b = 0; b < x.q_blocks(); ++b)
      x.block_segment.push_back(static_cast<std::int32_t>(random() % x.segments));
    x.column_offset.assign(1, 0);
    for (int list = 0; list < x.index_heads * x.segments; ++list) {
      for (std::int32_t j = 0; j < x.k_tokens; ++j)
        if (random() % (list % 2 ? 2 : 7) == 0) x.columns.push_back(j);
      x.column_offset.push_back(static_cast<std::int64_t>(x.columns.size()));
    }
    cover_columns(x);
  }
}

struct Shape4 {
  int kv_heads, group, head_dim;
};

class Attention : public ::testing::Test {
 protected:
  const std::uint64_t seed_ = test_seed();
  std::mt19937_64 random_{seed_};
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, fmt::format("seed {}", seed_)};

  AttentionCase make(std::vector<AxisToken> queries, std::vector<AxisToken> keys, Shape4 shape,
                     DType type) {
    AttentionCase c;
    c.queries = std::move(queries);
    c.keys = std::move(keys);
    c.kv_heads = shape.kv_heads;
    c.q_heads = shape.kv_heads * shape.group;
    c.head_dim = shape.head_dim;
    c.type = type;
    c.index = dense_pattern(c.queries, c.keys).arrays();
    c.fill(random_);
    return c;
  }
};

TEST_F(Attention, DensePackedAndPrefixMatchTheReference) {
  struct Axes {
    const char* name;
    std::vector<AxisToken> queries, keys;
  };
  const auto one = axis({{0, 333}}),
             packed = axis({{0, 1}, {0, 70}, {0, 0}, {0, 64}, {0, 5}, {0, 129}, {0, 1}});
  const auto chunk = axis({{130, 301}}), prefix = axis({{0, 301}});
  const std::vector<Axes> cases = {{"dense", one, one},
                                   {"packed", packed, packed},
                                   {"stored prefix", chunk, prefix},
                                   {"two prefixed segments", axis({{40, 110}, {0, 30}, {7, 9}}),
                                    axis({{0, 110}, {0, 30}, {0, 9}})},
                                   {"one token", axis({{0, 1}}), axis({{0, 1}})},
                                   {"one query, many keys", axis({{600, 601}}), axis({{0, 601}})}};
  for (const auto& axes : cases)
    for (DType type : {DType::f32, DType::f64})
      for (const Shape4& shape :
           {Shape4{1, 1, 64}, {2, 2, 16}, {1, 4, 80}, {2, 7, 64}, {1, 1, 128}, {3, 1, 7}}) {
        SCOPED_TRACE(fmt::format("{}, {}, {} key heads, group {}, head dim {}", axes.name,
                                 name(type), shape.kv_heads, shape.group, shape.head_dim));
        const AttentionCase c = make(axes.queries, axes.keys, shape, type);
        expect_close(run_kernel(c), reference_attention(c), tolerance(type));
      }
}

TEST_F(Attention, EveryPatternMatchesTheReference) {
  for (Pattern pattern : {Pattern::dense, Pattern::runs, Pattern::row_masks, Pattern::columns,
                          Pattern::runs_and_columns})
    for (bool per_head : {false, true})
      for (DType type : {DType::f32, DType::f64})
        for (const Shape4& shape : {Shape4{2, 1, 64}, {1, 3, 16}, {2, 2, 80}}) {
          SCOPED_TRACE(fmt::format("pattern {}, per head {}, {}, group {}, head dim {}",
                                   static_cast<int>(pattern), per_head, name(type), shape.group,
                                   shape.head_dim));
          const auto tokens = random_() % 2
                                  ? axis({{0, 450 + static_cast<std::int64_t>(random_() % 64)}})
                                  : axis({{0, 100}, {0, 28}, {0, 250}});
          AttentionCase c = make(tokens, tokens, shape, type);
          set_pattern(c, pattern, per_head, random_);
          ASSERT_EQ(problems(c.index), "");
          expect_close(run_kernel(c), reference_attention(c), tolerance(type));
        }
}

TEST_F(Attention, WideTilesAreCutAndJoined) {
  // More keys than a tile holds, with many short runs, so that tiles hold several pieces and runs
  // are cut.
  for (DType type : {DType::f32, DType::f64})
    for (const Shape4& shape : {Shape4{1, 1, 16}, {1, 16, 16}}) {
      const auto queries = axis({{2900, 3001}}), keys = axis({{0, 3001}});
      AttentionCase c = make(queries, keys, shape, type);
      expect_close(run_kernel(c), reference_attention(c), tolerance(type));
      set_pattern(c, Pattern::runs_and_columns, false, random_);
      expect_close(run_kernel(c), reference_attention(c), tolerance(type));
    }
}

TEST_F(Attention, StridedRowsAndAccumulation) {
  const auto tokens = axis({{0, 90}, {0, 75}});
  for (DType type : {DType::f32, DType::f64}) {
    AttentionCase c = make(tokens, tokens, {2, 2, 16}, type);
    set_pattern(c, Pattern::runs_and_columns, false, random_);
    AttentionResult expected = reference_attention(c);
    for (auto* gradient : {&expected.dq, &expected.dk, &expected.dv})
      for (double& x : *gradient) x += 0.75;
    expect_close(run_kernel(c, 4, 0.75), expected, tolerance(type));
  }
}

TEST_F(Attention, RingShardsMergeToTheWhole) {
  MicroBatch batch{{{0, 0, 97, 97}, {1, 0, 1, 1}, {2, 0, 0, 0}, {3, 0, 210, 210}, {4, 0, 3, 3}}};
  const auto whole_axis =
      local_tokens(batch, SequenceLayout(LayoutKind::contiguous, batch.tokens(), 1), 0);
  for (DType type : {DType::f32, DType::f64}) {
    const Shape4 shape{2, 2, 32};
    const AttentionCase whole = make(whole_axis, whole_axis, shape, type);
    const AttentionResult expected = reference_attention(whole);
    const std::int64_t q_row = whole.q_heads * whole.head_dim,
                       k_row = whole.kv_heads * whole.head_dim;
    for (auto kind :
         {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::shuffled})
      for (std::int64_t stripe : {1, 3, 64}) {
        if (!deals_stripes(kind) && stripe != 64) continue;
        const int ranks = 1 + static_cast<int>(random_() % 6);
        SCOPED_TRACE(
            fmt::format("{} over {} ranks, stripe {}, {}", name(kind), ranks, stripe, name(type)));
        const SequenceLayout layout(kind, batch.tokens(), ranks, stripe);
        const auto shard = [&](const std::vector<double>& values, std::int64_t row, int rank) {
          std::vector<double> part;
          for (std::int64_t i = 0; i < layout.local_tokens(rank); ++i) {
            const auto from = values.begin() + layout.global(rank, i) * row;
            part.insert(part.end(), from, from + row);
          }
          return part;
        };
        const auto rows = [&](const std::vector<double>& values, int heads, int rank) {
          return make_rows(shard(values, heads * whole.head_dim, rank), layout.local_tokens(rank),
                           heads, whole.head_dim, type);
        };
        const auto zeros = [&](int heads, int rank) {
          Tensor t = Tensor::empty({layout.local_tokens(rank), heads, whole.head_dim}, type);
          t.zero();
          return t;
        };
        std::vector<Tensor> dk, dv;
        for (int r = 0; r < ranks; ++r)
          dk.push_back(zeros(whole.kv_heads, r)), dv.push_back(zeros(whole.kv_heads, r));
        for (int r = 0; r < ranks; ++r) {
          const std::int64_t tokens = layout.local_tokens(r);
          const Tensor q = rows(whole.q, whole.q_heads, r), d_o = rows(whole.d_o, whole.q_heads, r);
          Tensor o = zeros(whole.q_heads, r), part = zeros(whole.q_heads, r),
                 dq = zeros(whole.q_heads, r);
          Tensor lse = Tensor::empty({whole.q_heads, tokens}, type),
                 lse_part = Tensor::empty({whole.q_heads, tokens}, type), delta = lse_part.clone();
          std::vector<AttentionPattern> index;
          for (int s = 0; s < ranks; ++s) {
            index.push_back(
                dense_pattern(local_tokens(batch, layout, r), local_tokens(batch, layout, s)));
            const Tensor k = rows(whole.k, whole.kv_heads, s), v = rows(whole.v, whole.kv_heads, s);
            attention_forward(index[s], q, k, v, whole.scale, s == 0 ? o : part,
                              s == 0 ? lse : lse_part);
            if (s > 0) attention_merge(o, lse, part, lse_part);
          }
          attention_delta(o, d_o, delta);
          for (int s = 0; s < ranks; ++s)
            attention_backward(index[s], q, rows(whole.k, whole.kv_heads, s),
                               rows(whole.v, whole.kv_heads, s), whole.scale, lse, delta, d_o, dq,
                               dk[s], dv[s]);
          EXPECT_LE(relative_error(values_of(o), shard(expected.o, q_row, r)), tolerance(type))
              << "o of rank " << r;
          EXPECT_LE(relative_error(values_of(dq), shard(expected.dq, q_row, r)),
                    2 * tolerance(type))
              << "dq of rank " << r;
          for (int h = 0; h < whole.q_heads; ++h)
            for (std::int64_t i = 0; i < tokens; ++i)
              ASSERT_NEAR(values_of(lse)[h * tokens + i],
                          expected.lse[h * batch.tokens() + layout.global(r, i)],
                          20 * tolerance(type));
        }
        for (int s = 0; s < ranks; ++s) {
          EXPECT_LE(relative_error(values_of(dk[s]), shard(expected.dk, k_row, s)),
                    2 * tolerance(type))
              << "dk of rank " << s;
          EXPECT_LE(relative_error(values_of(dv[s]), shard(expected.dv, k_row, s)),
                    2 * tolerance(type))
              << "dv of rank " << s;
        }
      }
  }
}

TEST_F(Attention, GradientsAgreeWithCentralDifferences) {
  const auto tokens = axis({{0, 40}, {0, 35}});
  for (Pattern pattern : {Pattern::dense, Pattern::row_masks, Pattern::runs_and_columns}) {
    AttentionCase c = make(tokens, tokens, {1, 2, 5}, DType::f64);
    set_pattern(c, pattern, true, random_);
    const AttentionResult got = run_kernel(c);
    const auto loss = [&] {  // sum of o * d_o
      const Tensor q = make_rows(c.q, 75, 2, 5, c.type), k = make_rows(c.k, 75, 1, 5, c.type),
                   v = make_rows(c.v, 75, 1, 5, c.type);
      Tensor o = Tensor::empty({75, 2, 5}, c.type), lse = Tensor::empty({2, 75}, c.type);
      attention_forward(AttentionPattern(c.index), q, k, v, c.scale, o, lse);
      double sum = 0;
      for (std::size_t i = 0; i < c.d_o.size(); ++i) sum += o.data<double>()[i] * c.d_o[i];
      return sum;
    };
    for (auto [x, gradient] : {std::pair{&c.q, &got.dq}, {&c.k, &got.dk}, {&c.v, &got.dv}})
      for (int trial = 0; trial < 40; ++trial) {
        const std::size_t i = random_() % x->size();
        const double at = (*x)[i], h = 1e-5;
        (*x)[i] = at + h;
        const double up = loss();
        (*x)[i] = at - h;
        const double down = loss();
        (*x)[i] = at;
        ASSERT_NEAR((up - down) / (2 * h), (*gradient)[i], 1e-8)
            << "pattern " << static_cast<int>(pattern) << " element " << i;
      }
  }
}

TEST_F(Attention, RowsWithoutKeysAreExactZeros) {
  // Queries of segment 0 at positions 0..69 see keys of positions 50.. only from row 50 on; segment
  // 1 has no keys.
  const auto queries = axis({{0, 70}, {0, 80}}), keys = axis({{50, 70}});
  for (DType type : {DType::f32, DType::f64}) {
    const AttentionCase c = make(queries, keys, {1, 2, 16}, type);
    const AttentionResult got = run_kernel(c);
    expect_close(got, reference_attention(c), tolerance(type));
    for (std::int64_t i = 0; i < 150; ++i) {
      if (i >= 50 && i < 70) continue;
      for (int x = 0; x < 32; ++x) {
        ASSERT_EQ(got.o[i * 32 + x], 0);
        ASSERT_EQ(got.dq[i * 32 + x], 0);
      }
      for (int h = 0; h < 2; ++h)
        ASSERT_EQ(got.lse[h * 150 + i], -std::numeric_limits<double>::infinity());
    }
  }
  for (const auto& [q_axis, k_axis] :
       {std::pair{axis({{0, 5}}), axis({})}, {axis({}), axis({{0, 5}})}, {axis({}), axis({})}}) {
    const AttentionCase c = make(q_axis, k_axis, {1, 2, 16}, DType::f32);
    const AttentionResult got = run_kernel(c, 0, 0.5), expected = reference_attention(c);
    EXPECT_EQ(got.o, expected.o);
    EXPECT_EQ(got.lse, expected.lse);
    for (double x : got.dk) EXPECT_EQ(x, 0.5);
  }
}

TEST_F(Attention, MergeGuardsEmptySides) {
  for (DType type : {DType::f32, DType::f64})
    dispatch_float(type, [&](auto zero) {
      using T = decltype(zero);
      constexpr T nothing = -std::numeric_limits<T>::infinity();
      Tensor o = Tensor::empty({4, 1, 2}, type), part = Tensor::empty({4, 1, 2}, type),
             lse = Tensor::empty({1, 4}, type), lse_part = Tensor::empty({1, 4}, type);
      const T o_values[] = {1, 2, 3, 4, 0, 0, 0, 0}, part_values[] = {5, 6, 0, 0, 7, 8, 0, 0};
      const T lse_values[] = {std::log(T(1)), 80, nothing, nothing},
              lse_part_values[] = {std::log(T(3)), nothing, -90, nothing};
      std::copy_n(o_values, 8, o.data<T>()), std::copy_n(part_values, 8, part.data<T>());
      std::copy_n(lse_values, 4, lse.data<T>()),
          std::copy_n(lse_part_values, 4, lse_part.data<T>());
      attention_merge(o, lse, part, lse_part);
      const T expected[] = {4, 5, 3, 4, 7, 8, 0, 0},
              expected_lse[] = {std::log(T(4)), 80, -90, nothing};
      for (int i = 0; i < 8; ++i) EXPECT_NEAR(o.data<T>()[i], expected[i], 1e-5);
      for (int i = 0; i < 4; ++i) {
        if (expected_lse[i] == nothing)
          EXPECT_EQ(lse.data<T>()[i], nothing);
        else
          EXPECT_NEAR(lse.data<T>()[i], expected_lse[i], 1e-5);
      }
    });
}

TEST_F(Attention, LargeScoresDoNotOverflow) {
  const auto tokens = axis({{0, 200}});
  for (DType type : {DType::f32, DType::f64}) {
    AttentionCase c = make(tokens, tokens, {1, 1, 16}, type);
    for (double& x : c.q) x *= 64;  // scores up to several hundred
    const AttentionResult got = run_kernel(c), expected = reference_attention(c);
    EXPECT_LE(relative_error(got.lse, expected.lse), tolerance(type));
    EXPECT_LE(relative_error(got.o, expected.o),
              100 * tolerance(type));  // rounding of a score of 500 is 3e-5 in fp32
    EXPECT_LE(relative_error(got.dv, expected.dv), 100 * tolerance(type));
  }
}

TEST_F(Attention, NaNReachesTheOutput) {
  const auto tokens = axis({{0, 100}});
  for (int what = 0; what < 3; ++what) {
    AttentionCase c = make(tokens, tokens, {1, 1, 16}, DType::f32);
    (what == 0 ? c.q : what == 1 ? c.k : c.v)[70 * 16 + 3] = std::nan("");
    const AttentionResult got = run_kernel(c);
    EXPECT_TRUE(std::isnan(got.o[70 * 16]) || what == 2);
    EXPECT_TRUE(std::isnan(got.o[70 * 16 + 3]));
    EXPECT_EQ(what != 2, std::isnan(got.lse[70]));
    EXPECT_FALSE(std::isnan(got.o[20 * 16 + 3]));
  }
}

TEST_F(Attention, RepeatsBitForBit) {
  const auto tokens = axis({{0, 300}, {0, 211}});
  AttentionCase c = make(tokens, tokens, {2, 3, 64}, DType::f32);
  set_pattern(c, Pattern::runs_and_columns, true, random_);
  const AttentionResult a = run_kernel(c), b = run_kernel(c);
  EXPECT_EQ(a.o, b.o);
  EXPECT_EQ(a.dq, b.dq);
  EXPECT_EQ(a.dk, b.dk);
  EXPECT_EQ(a.dv, b.dv);
}

TEST_F(Attention, BadOperandsAreRefused) {
  const AttentionCase c = make(axis({{0, 10}}), axis({{0, 10}}), {1, 2, 16}, DType::f32);
  const auto rows = [](std::int64_t tokens, std::int64_t heads, std::int64_t d,
                       DType type = DType::f32) {
    return Tensor::zeros({tokens, heads, d}, type);
  };
  const Tensor q = rows(10, 2, 16), kv = rows(10, 1, 16);
  Tensor o = rows(10, 2, 16), lse = Tensor::zeros({2, 10}, DType::f32),
         wrong_lse = Tensor::zeros({10, 2}, DType::f32), f64 = rows(10, 2, 16, DType::f64);
  const auto call = [&](const Tensor& a, const Tensor& b, const Tensor& v, Tensor& out,
                        Tensor& sums) {
    attention_forward(AttentionPattern(c.index), a, b, v, 1.0, out, sums);
  };
  EXPECT_NO_THROW(call(q, kv, kv, o, lse));
  EXPECT_THROW(call(rows(11, 2, 16), kv, kv, o, lse), Error);
  EXPECT_THROW(call(q, rows(9, 1, 16), kv, o, lse), Error);
  EXPECT_THROW(call(q, kv, rows(10, 1, 8), o, lse), Error);
  EXPECT_THROW(call(q, rows(10, 3, 16), rows(10, 3, 16), o, lse), Error);
  EXPECT_THROW(call(q, rows(10, 1, 16, DType::f64), kv, o, lse), Error);
  EXPECT_THROW(call(q, kv, kv, f64, lse), Error);
  EXPECT_THROW(call(q, kv, kv, o, wrong_lse), Error);
  EXPECT_THROW(call(q.reshape({10, 32}), kv, kv, o, lse), Error);
  PatternArrays heads = listed(AttentionPattern(c.index));
  heads.index_heads = 3;
  for (int h = 1; h < 3; ++h) heads.run_offset.push_back(heads.run_offset.back());
  EXPECT_THROW(attention_forward(AttentionPattern(heads), q, kv, kv, 1.0, o, lse), Error);
  Tensor dq = rows(10, 2, 16), dk = rows(10, 1, 16), dv = rows(9, 1, 16);
  EXPECT_THROW(
      attention_backward(AttentionPattern(c.index), q, kv, kv, 1.0, lse, lse, o, dq, dk, dv),
      Error);
  EXPECT_THROW(attention_merge(o, lse, q, wrong_lse), Error);
  EXPECT_THROW(attention_delta(o, kv, lse), Error);
}

}  // namespace
}  // namespace ballast
