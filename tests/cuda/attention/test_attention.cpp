// Attention on CUDA (bf16) against its host twin in fp64 on the same inputs: every index feature,
// head grouping and awkward length.
#include <algorithm>
#include <limits>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/placed_patterns.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "tests/core/plan/attention/pattern_pairs.hpp"
#include "tests/core/plan/context/axis_tokens.hpp"
#include "tests/cuda/support.hpp"

namespace ballast::test {
namespace {

/// Probabilities and score gradients are rounded to bf16 before the second products, outputs once
/// more: relative L2 of the whole tensor, and the worst row (one token, one head) in units of the
/// largest row.
constexpr double kWhole = 1e-2, kRow = 2.5e-2;
constexpr double kLse = 3e-4;  // absolute; one key more or less among a thousand shows

using Axis = std::vector<AxisToken>;

Axis axis(const std::vector<std::pair<std::int64_t, std::int64_t>>& segments) {
  Axis tokens;
  for (std::size_t s = 0; s < segments.size(); ++s)
    for (std::int64_t p = segments[s].first; p < segments[s].second; ++p)
      tokens.push_back({static_cast<std::int32_t>(s), p});
  return tokens;
}

struct Heads {
  std::int64_t kv, group, dim;
  std::int64_t q() const { return kv * group; }
};

/// fp64 on the host, values that bf16 holds.
struct Problem {
  PatternArrays index;
  Heads heads{1, 1, 64};
  double scale = 0.125;
  Tensor q, k, v, d_o;
};

/// fp64 on the host; o and gradients [tokens, heads, dim], lse [heads, tokens].
struct Results {
  Tensor o, lse, dq, dk, dv;
};

/// What gradients hold before the call; they are added to.
struct Start {
  Tensor dq, dk, dv;
};

Results on_host(const Problem& p, const Start* start = nullptr) {
  Results r{Tensor::empty(p.q.shape(), f64), Tensor::empty({p.heads.q(), p.q.size(0)}, f64),
            Tensor::zeros(p.q.shape(), f64), Tensor::zeros(p.k.shape(), f64),
            Tensor::zeros(p.k.shape(), f64)};
  if (start) r.dq = start->dq.clone(), r.dk = start->dk.clone(), r.dv = start->dv.clone();
  Tensor delta = Tensor::empty(r.lse.shape(), f64);
  const AttentionWork work = AttentionPattern(p.index);
  attention_forward(work, p.q, p.k, p.v, p.scale, r.o, r.lse);
  attention_delta(r.o, p.d_o, delta);
  attention_backward(work, p.q, p.k, p.v, p.scale, r.lse, delta, p.d_o, r.dq, r.dk, r.dv);
  return r;
}

class CudaAttention : public CudaTest {
 protected:
  void TearDown() override {
    if (gpu) cuda::set_deterministic(false);
  }
  Problem problem(const Axis& queries, const Axis& keys, const Heads& heads) {
    Problem p;
    p.index = dense_pattern(queries, keys).arrays();
    p.heads = heads;
    p.scale = 1 / std::sqrt(static_cast<double>(heads.dim));
    const auto tq = static_cast<std::int64_t>(queries.size()),
               tk = static_cast<std::int64_t>(keys.size());
    p.q = random({tq, heads.q(), heads.dim});
    p.k = random({tk, heads.kv, heads.dim});
    p.v = random({tk, heads.kv, heads.dim});
    p.d_o = random({tq, heads.q(), heads.dim});
    return p;
  }

  Results on_gpu(const Problem& p, DType o_type = b16, const Start* start = nullptr) {
    const Tensor q = to_gpu(p.q, b16), k = to_gpu(p.k, b16), v = to_gpu(p.v, b16),
                 d_o = to_gpu(p.d_o, b16);
    Tensor o = unwritten(p.q.shape(), o_type), lse = unwritten({p.heads.q(), p.q.size(0)}, f32),
           delta = unwritten(lse.shape(), f32);
    const bool adds = start != nullptr;  // else what lies there is overwritten
    const auto sums = [&](const Tensor& host, const Shape& shape) {
      return adds ? to_gpu(host, f32) : unwritten(shape, f32);
    };
    Tensor dq = sums(start ? start->dq : Tensor(), p.q.shape()),
           dk = sums(start ? start->dk : Tensor(), p.k.shape()),
           dv = sums(start ? start->dv : Tensor(), p.k.shape());
    const AttentionWork work = place_pattern(AttentionPattern(p.index), q, k);
    attention_forward(work, q, k, v, p.scale, o, lse);
    if (o.numel() > 0) attention_delta(o, d_o, delta);
    attention_backward(work, q, k, v, p.scale, lse, delta, d_o, dq, dk, dv,
                       {.dq = adds, .dkv = adds});
    return {to_host(o), to_host(lse), to_host(dq), to_host(dk), to_host(dv)};
  }

  void expect_rows(const char* what, const Tensor& found, const Tensor& expected) {
    const std::int64_t width = expected.rank() == 3 ? expected.size(2) : 1,
                       rows = expected.numel() / std::max<std::int64_t>(1, width);
    double difference = 0, norm = 0, worst = 0, largest = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      double d = 0, n = 0;
      for (std::int64_t x = r * width; x < (r + 1) * width; ++x) {
        const double a = found.data<double>()[x], b = expected.data<double>()[x];
        d += (a - b) * (a - b);
        n += b * b;
      }
      difference += d;
      norm += n;
      worst = d <= worst ? worst : d;  // a NaN stays
      largest = std::max(largest, n);
    }
    // Tensors that are zero by nature (the gradient of a softmax over one key) are held to 1e-4 of
    // unit values.
    const double floor = 1e-4 * static_cast<double>(expected.numel());
    EXPECT_TRUE(std::sqrt(difference) <= kWhole * std::sqrt(std::max(norm, floor)))
        << what << ": relative error " << std::sqrt(difference / std::max(norm, floor));
    EXPECT_TRUE(std::sqrt(worst) <=
                kRow * std::sqrt(std::max(largest, 1e-4 * static_cast<double>(width))))
        << what << ": worst row " << std::sqrt(worst) << ", largest row " << std::sqrt(largest);
  }
  void expect_lse(const Tensor& found, const Tensor& expected) {
    for (std::int64_t i = 0; i < expected.numel(); ++i) {
      const double a = found.data<double>()[i], b = expected.data<double>()[i];
      ASSERT_TRUE(std::isinf(b) ? a == b : std::abs(a - b) <= kLse * std::max(1.0, std::abs(b)))
          << "lse " << i << ": " << a << ", expected " << b;
    }
  }
  void expect_close(const Results& found, const Results& expected) {
    expect_rows("o", found.o, expected.o);
    expect_lse(found.lse, expected.lse);
    expect_rows("dq", found.dq, expected.dq);
    expect_rows("dk", found.dk, expected.dk);
    expect_rows("dv", found.dv, expected.dv);
  }
  std::string trace(const char* what, const Heads& h) const {
    return fmt::format("{}, {} key/value heads, group {}, head dim {}, seed {}", what, h.kv,
                       h.group, h.dim, seed);
  }
};

TEST_F(CudaAttention, DenseCausalOfEveryGroupHeadDimAndOddLength) {
  for (const std::int64_t tokens : {1, 63, 64, 65, 127, 130, 333})
    for (const std::int64_t dim : {64, 96, 128, 256})
      for (const std::int64_t group : {1, 2, 7, 8, 16}) {
        const Heads heads{group == 16 ? 1 : 2, group, dim};
        SCOPED_TRACE(trace(fmt::format("{} tokens", tokens).c_str(), heads));
        const Problem p = problem(axis({{0, tokens}}), axis({{0, tokens}}), heads);
        expect_close(on_gpu(p, group % 2 ? b16 : f32), on_host(p));
      }
}

TEST_F(CudaAttention, PackedSegmentsAndStoredPrefixes) {
  struct Axes {
    const char* name;
    Axis queries, keys;
  };
  const Axis packed =
      axis({{0, 1}, {0, 70}, {0, 0}, {0, 64}, {0, 5}, {0, 129}, {0, 1}, {0, 1}, {0, 300}, {0, 2}});
  const Axes cases[] = {{"packed, one-token and empty segments", packed, packed},
                        {"stored prefix", axis({{130, 301}}), axis({{0, 301}})},
                        {"stored prefix, one query", axis({{600, 601}}), axis({{0, 601}})},
                        {"two prefixed segments", axis({{40, 210}, {0, 30}, {7, 9}}),
                         axis({{0, 210}, {0, 30}, {0, 9}})},
                        {"keys after the queries", axis({{0, 100}}), axis({{0, 400}})}};
  for (const Axes& axes : cases)
    for (const Heads& heads :
         {Heads{1, 1, 64}, {2, 2, 128}, {1, 7, 64}, {1, 16, 128}, {2, 3, 96}, {1, 4, 256}}) {
      SCOPED_TRACE(trace(axes.name, heads));
      const Problem p = problem(axes.queries, axes.keys, heads);
      expect_close(on_gpu(p, f32), on_host(p));
      expect_close(on_gpu(p, b16), on_host(p));
    }
}

enum class Pattern { runs, row_masks, columns, runs_and_columns };

/// Random lists in place of the dense runs of packed segments that start at multiples of 64
/// (`starts`, then the end).
template <class Random>
void set_pattern(PatternArrays& x, Pattern pattern, int index_heads,
                 const std::vector<std::int64_t>& starts, Random& random) {
  x.index_heads = index_heads;
  x.dense = false;
  x.run_offset = {0};
  for (int h = 0; h < index_heads; ++h)
    for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
      const bool none =
          pattern == Pattern::columns || random() % 5 == 0;  // some query blocks have no run
      for (std::int32_t k = 0; !none;) {
        const auto first = k + static_cast<std::int32_t>(random() % 3),
                   last = first + 1 + static_cast<std::int32_t>(random() % 3);
        if (last > x.k_blocks()) break;
        if (pattern == Pattern::row_masks && random() % 3 != 0) {
          const std::uint64_t mask = static_cast<std::uint64_t>(random()) << 32 | random();
          for (const std::uint64_t rows :
               {mask, ~mask & (static_cast<std::uint64_t>(random()) << 32 | random())}) {
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
  if (pattern != Pattern::columns && pattern != Pattern::runs_and_columns) return;
  x.segments = static_cast<int>(starts.size()) - 1;
  for (std::int64_t b = 0; b < x.q_blocks(); ++b)
    x.block_segment.push_back(
        static_cast<std::int32_t>(std::upper_bound(starts.begin(), starts.end() - 1, b * kBlock) -
                                  starts.begin()) -
        1);
  x.column_offset = {0};
  for (int h = 0; h < index_heads; ++h)
    for (int s = 0; s < x.segments; ++s) {
      const unsigned sparse =
          s % 3 == 2 ? 1u << 30 : 3 + 8 * (h % 2);  // one segment in three has (next to) no columns
      for (std::int64_t j = starts[s]; j < starts[s + 1]; ++j)
        if (random() % sparse == 0) x.columns.push_back(static_cast<std::int32_t>(j));
      x.column_offset.push_back(static_cast<std::int64_t>(x.columns.size()));
    }
  cover_columns(x);
}

TEST_F(CudaAttention, RunsRowMasksAndColumns) {
  const std::vector<std::int64_t> starts{0, 448, 512, 704, 1001};
  Axis tokens;
  for (std::size_t s = 0; s + 1 < starts.size(); ++s)
    for (std::int64_t i = starts[s]; i < starts[s + 1]; ++i)
      tokens.push_back({static_cast<std::int32_t>(s), i - starts[s]});
  for (const Pattern pattern :
       {Pattern::runs, Pattern::row_masks, Pattern::columns, Pattern::runs_and_columns})
    for (const bool per_head : {false, true})
      for (const Heads& heads :
           {Heads{1, 1, 64}, {2, 2, 128}, {1, 7, 128}, {1, 8, 64}, {1, 16, 64}}) {
        SCOPED_TRACE(
            trace(fmt::format("pattern {}, index per head {}", static_cast<int>(pattern), per_head)
                      .c_str(),
                  heads));
        Problem p = problem(tokens, tokens, heads);
        set_pattern(p.index, pattern, per_head ? static_cast<int>(heads.q()) : 1, starts, rng);
        ASSERT_EQ(problems(p.index), "");
        expect_close(on_gpu(p, f32), on_host(p));
      }
}

TEST_F(CudaAttention, ATwinServesCallsOfItsHeadsAlone) {
  const Axis tokens = axis({{0, 200}, {0, 77}});
  const Problem a = problem(tokens, tokens, {1, 2, 64}), b = problem(tokens, tokens, {2, 8, 64});
  const AttentionPattern pattern(a.index);
  const Tensor q = to_gpu(a.q, b16), k = to_gpu(a.k, b16), v = to_gpu(a.v, b16);
  Tensor o = unwritten(a.q.shape(), b16), lse = unwritten({2, a.q.size(0)}, f32);
  EXPECT_THROW(attention_forward(pattern, q, k, v, a.scale, o, lse), Error) << "not placed";
  EXPECT_THROW(attention_forward(place_pattern(pattern, to_gpu(b.q, b16), to_gpu(b.k, b16)), q, k,
                                 v, a.scale, o, lse),
               Error)
      << "for other heads";
  PlacedPatterns placed({pattern});
  const AttentionWork* first = &placed.at(q, k).front();
  EXPECT_EQ(&placed.at(q, k).front(), first);
  EXPECT_NO_THROW(attention_forward(*first, q, k, v, a.scale, o, lse));
}

TEST_F(CudaAttention, RingShardsOfEveryLayoutMergeToTheWhole) {
  const MicroBatch batch{
      {{0, 0, 197, 197}, {1, 0, 1, 1}, {2, 0, 0, 0}, {3, 0, 410, 410}, {4, 0, 3, 3}}};
  const Axis whole_axis =
      local_tokens(batch, SequenceLayout(LayoutKind::contiguous, batch.tokens(), 1), 0);
  for (const Heads& heads : {Heads{2, 2, 64}, {1, 7, 128}}) {
    const Problem whole = problem(whole_axis, whole_axis, heads);
    const Results expected = on_host(whole);
    for (const auto& [kind, stripe] : {std::pair{LayoutKind::contiguous, 64},
                                       {LayoutKind::zigzag, 64},
                                       {LayoutKind::striped, 1},
                                       {LayoutKind::striped, 3},
                                       {LayoutKind::striped, 64},
                                       {LayoutKind::shuffled, 64}}) {
      const int ranks = 2 + static_cast<int>(rng() % 4);
      SCOPED_TRACE(trace(
          fmt::format("{} over {} ranks, stripe {}", name(kind), ranks, stripe).c_str(), heads));
      const SequenceLayout layout(kind, batch.tokens(), ranks, stripe);
      const auto shard = [&](const Tensor& all,
                             int rank) {  // rows of dimension 0 that lie on a rank
        Shape shape = all.shape();
        shape[0] = layout.local_tokens(rank);
        Tensor part = Tensor::empty(shape, f64);
        for (std::int64_t i = 0; i < shape[0]; ++i)
          part.rows(i, i + 1).copy_from(
              all.rows(layout.global(rank, i), layout.global(rank, i) + 1));
        return part;
      };
      std::vector<Tensor> k, v, dk, dv;
      for (int s = 0; s < ranks; ++s) {
        k.push_back(to_gpu(shard(whole.k, s), b16));
        v.push_back(to_gpu(shard(whole.v, s), b16));
        dk.push_back(Tensor::zeros(k.back().shape(), f32, *gpu));
        dv.push_back(Tensor::zeros(k.back().shape(), f32, *gpu));
      }
      for (int r = 0; r < ranks; ++r) {
        const std::int64_t tokens = layout.local_tokens(r);
        if (tokens == 0) continue;
        const Tensor q = to_gpu(shard(whole.q, r), b16), d_o = to_gpu(shard(whole.d_o, r), b16);
        Tensor o = unwritten(q.shape(), f32), part = unwritten(q.shape(), f32),
               dq = Tensor::zeros(q.shape(), f32, *gpu);
        Tensor lse = unwritten({heads.q(), tokens}, f32), part_lse = unwritten(lse.shape(), f32),
               delta = unwritten(lse.shape(), f32);
        std::vector<AttentionWork> index;
        for (int s = 0; s < ranks; ++s) {
          index.push_back(place_pattern(
              dense_pattern(local_ranges(batch, layout, r), local_ranges(batch, layout, s)), q,
              k[s]));
          attention_forward(index[s], q, k[s], v[s], whole.scale, s == 0 ? o : part,
                            s == 0 ? lse : part_lse);
          if (s > 0) attention_merge(o, lse, part, part_lse);
        }
        attention_delta(o, d_o, delta);
        for (int s = 0; s < ranks; ++s)
          attention_backward(index[s], q, k[s], v[s], whole.scale, lse, delta, d_o, dq, dk[s],
                             dv[s]);
        expect_rows("o", to_host(o), shard(expected.o, r));
        expect_rows("dq", to_host(dq), shard(expected.dq, r));
        const Tensor found = to_host(lse);
        for (std::int64_t h = 0; h < heads.q(); ++h)
          for (std::int64_t i = 0; i < tokens; ++i)
            ASSERT_NEAR(found.data<double>()[h * tokens + i],
                        expected.lse.data<double>()[h * batch.tokens() + layout.global(r, i)],
                        2 * kLse * 8);
      }
      for (int s = 0; s < ranks; ++s) {
        expect_rows("dk", to_host(dk[s]), shard(expected.dk, s));
        expect_rows("dv", to_host(dv[s]), shard(expected.dv, s));
      }
    }
  }
}

TEST_F(CudaAttention, SlicesOfFusedBuffersAndAccumulation) {
  const Axis tokens = axis({{0, 190}, {0, 75}});
  for (const Heads& heads : {Heads{2, 2, 64}, {1, 8, 128}}) {
    SCOPED_TRACE(trace("fused buffer", heads));
    const Problem p = problem(tokens, tokens, heads);
    const std::int64_t n = p.q.size(0), hq = heads.q(), hkv = heads.kv, all = hq + 2 * hkv;
    const Start start{random(p.q.shape()), random(p.k.shape()), random(p.k.shape())};
    const Results expected = on_host(p, &start);
    expect_close(on_gpu(p, f32, &start), expected);

    // q, k and v side by side, and their gradients likewise: as the layers have them.
    Tensor fused = Tensor::empty({n, all, heads.dim}, f64),
           sums = Tensor::empty({n, all, heads.dim}, f64);
    const auto columns = [&](Tensor& to, const Tensor& from, std::int64_t at) {
      for (std::int64_t i = 0; i < n; ++i)
        std::copy_n(from.data<double>() + i * from.size(1) * heads.dim, from.size(1) * heads.dim,
                    to.data<double>() + (i * all + at) * heads.dim);
    };
    columns(fused, p.q, 0), columns(fused, p.k, hq), columns(fused, p.v, hq + hkv);
    columns(sums, start.dq, 0), columns(sums, start.dk, hq), columns(sums, start.dv, hq + hkv);
    const Tensor qkv = to_gpu(fused, b16), d_o = to_gpu(p.d_o, b16), d_qkv = to_gpu(sums, f32);
    const Tensor q = qkv.narrow(1, 0, hq), k = qkv.narrow(1, hq, hq + hkv),
                 v = qkv.narrow(1, hq + hkv, all);
    Tensor dq = d_qkv.narrow(1, 0, hq), dk = d_qkv.narrow(1, hq, hq + hkv),
           dv = d_qkv.narrow(1, hq + hkv, all);
    Tensor o = unwritten(p.q.shape(), b16), lse = unwritten({hq, n}, f32),
           delta = unwritten({hq, n}, f32);
    const AttentionWork work = place_pattern(AttentionPattern(p.index), q, k);
    attention_forward(work, q, k, v, p.scale, o, lse);
    attention_delta(o, d_o, delta);
    attention_backward(work, q, k, v, p.scale, lse, delta, d_o, dq, dk, dv);
    Tensor want = Tensor::empty(fused.shape(), f64);
    columns(want, expected.dq, 0), columns(want, expected.dk, hq),
        columns(want, expected.dv, hq + hkv);
    expect_rows("o", to_host(o), expected.o);
    expect_rows("gradients", to_host(d_qkv), want);
  }
}

TEST_F(CudaAttention, RowsWithoutKeysAreExactZeros) {
  // Queries at positions 0..149 see keys of positions 50..69 only from row 50 on; the second
  // segment has none.
  for (const Heads& heads : {Heads{1, 2, 64}, {1, 7, 128}}) {
    const Problem p = problem(axis({{0, 150}, {0, 80}}), axis({{50, 70}}), heads);
    const Results found = on_gpu(p), expected = on_host(p);
    expect_close(found, expected);
    const std::int64_t width = heads.q() * heads.dim;
    for (std::int64_t i = 0; i < 230; ++i) {
      if (i >= 50 && i < 150) continue;
      for (std::int64_t x = i * width; x < (i + 1) * width; ++x) {
        ASSERT_EQ(found.o.data<double>()[x], 0) << "row " << i;
        ASSERT_EQ(found.dq.data<double>()[x], 0) << "row " << i;
      }
      for (std::int64_t h = 0; h < heads.q(); ++h)
        ASSERT_EQ(found.lse.data<double>()[h * 230 + i], -std::numeric_limits<double>::infinity());
    }
  }
  const Problem no_keys = problem(axis({{0, 70}}), axis({}), {1, 2, 64});
  const Results none = on_gpu(no_keys);
  for (std::int64_t x = 0; x < none.o.numel(); ++x) ASSERT_EQ(none.o.data<double>()[x], 0);
  for (std::int64_t x = 0; x < none.lse.numel(); ++x)
    ASSERT_EQ(none.lse.data<double>()[x], -std::numeric_limits<double>::infinity());
  const Problem no_queries = problem(axis({}), axis({{0, 70}}), {1, 2, 64});
  EXPECT_NO_THROW(on_gpu(no_queries));
}

TEST_F(CudaAttention, ManyQueriesWithoutKeysFollowEachOther) {
  // As half of a zigzag rank's queries against the keys between its pieces: so many that each
  // multiprocessor takes several items without a tile, one after another.
  for (const Heads& heads : {Heads{1, 4, 64}, {1, 2, 128}, {1, 2, 256}})
    for (const bool lists : {false, true})
      for (const bool deterministic : {false, true}) {
        SCOPED_TRACE(trace(lists ? "lists" : "dense", heads));
        const std::int64_t before = 64 * 3000 / heads.q() / (heads.dim / 64), after = 130;
        Problem p = problem(axis({{0, before + after}}), axis({{before, before + after}}), heads);
        if (lists) p.index = listed(AttentionPattern(p.index));
        cuda::set_deterministic(deterministic);
        expect_close(on_gpu(p), on_host(p));
      }
}

TEST_F(CudaAttention, MergeAndDelta) {
  const std::int64_t n = 203, heads = 5, dim = 64;
  const double nothing = -std::numeric_limits<double>::infinity();
  Tensor o = random({n, heads, dim}), lse = random({heads, n}, 30), part = random({n, heads, dim}),
         part_lse = random({heads, n}, 30);
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t i = 0; i < n; ++i) {  // nothing on the left, on the right, on both sides
      const auto clear = [&](Tensor& x, Tensor& l) {
        l.data<double>()[h * n + i] = nothing;
        std::fill_n(x.data<double>() + (i * heads + h) * dim, dim, 0.0);
      };
      if (i % 7 == 1 || i % 7 == 3) clear(o, lse);
      if (i % 7 == 2 || i % 7 == 3) clear(part, part_lse);
    }
  Tensor o_gpu = to_gpu(o, f32), lse_gpu = to_gpu(lse, f32);
  attention_merge(o_gpu, lse_gpu, to_gpu(part, f32), to_gpu(part_lse, f32));
  attention_merge(o, lse, part, part_lse);
  EXPECT_CLOSE(o_gpu, o, kFp32);
  expect_lse(to_host(lse_gpu), lse);
  const Tensor d_o = random({n, heads, dim});
  Tensor rounded_o = random({n, heads, dim}), delta = Tensor::empty({heads, n}, f64);
  attention_delta(rounded_o, d_o, delta);
  for (const DType type : {b16, f32}) {
    Tensor delta_gpu = unwritten({heads, n}, f32);
    attention_delta(to_gpu(rounded_o, type), to_gpu(d_o, b16), delta_gpu);
    EXPECT_CLOSE(delta_gpu, delta, kFp32);
  }
}

TEST_F(CudaAttention, DeterministicBackwardRepeatsItsBits) {
  const std::vector<std::int64_t> starts{0, 640, 1001};
  const Axis tokens = axis({{0, 640}, {0, 361}});
  for (const Pattern pattern : {Pattern::runs, Pattern::row_masks, Pattern::runs_and_columns})
    for (const Heads& heads : {Heads{2, 2, 128}, {1, 7, 64}, {1, 2, 96}, {2, 2, 256}}) {
      SCOPED_TRACE(trace(fmt::format("pattern {}", static_cast<int>(pattern)).c_str(), heads));
      Problem p = problem(tokens, tokens, heads);
      set_pattern(p.index, pattern, static_cast<int>(heads.q()), starts, rng);
      cuda::set_deterministic(true);
      const Results a = on_gpu(p);
      const Results b = on_gpu(p);  // preparation on the GPU repeats too
      for (const auto& [x, y] :
           {std::pair{a.o, b.o}, {a.lse, b.lse}, {a.dq, b.dq}, {a.dk, b.dk}, {a.dv, b.dv}})
        ASSERT_EQ(std::memcmp(x.raw(), y.raw(), x.bytes()), 0);
      expect_close(a, on_host(p));
      cuda::set_deterministic(false);
      expect_close(on_gpu(p), on_host(p));
    }
}

TEST_F(CudaAttention, DeterministicBackwardOfDenseAttentionTakesTurns) {
  const Axis one = axis({{0, 1501}}),
             packed = axis({{0, 900}, {0, 1}, {0, 63}, {0, 0}, {0, 700}, {0, 130}});
  const std::pair<Axis, Axis> cases[] = {
      {one, one}, {packed, packed}, {axis({{1300, 1501}}), one}, {axis({{0, 100}}), one}};
  for (const auto& [queries, keys] : cases)
    for (const Heads& heads :
         {Heads{2, 8, 128}, {1, 7, 64}, {3, 1, 64}, {1, 12, 96}, {1, 4, 256}, {5, 1, 256}}) {
      SCOPED_TRACE(trace(fmt::format("{} x {}", queries.size(), keys.size()).c_str(), heads));
      const Problem p = problem(queries, keys, heads);
      cuda::set_deterministic(true);
      const Results first = on_gpu(p);
      for (int repeat = 0; repeat < 3; ++repeat) {
        const Results again = on_gpu(p);
        for (const auto& [x, y] :
             {std::pair{first.dq, again.dq}, {first.dk, again.dk}, {first.dv, again.dv}})
          ASSERT_EQ(std::memcmp(x.raw(), y.raw(), x.bytes()), 0);
      }
      cuda::set_deterministic(false);
      expect_close(first, on_host(p));
    }
}

TEST_F(CudaAttention, LargeScoresDoNotOverflow) {
  const Axis tokens = axis({{0, 300}});
  for (const std::int64_t dim : {64, 96, 128, 256}) {
    Problem p = problem(tokens, tokens, {1, 2, dim});
    for (std::int64_t i = 0; i < p.q.numel(); ++i)
      p.q.data<double>()[i] *= 64;  // scores of several hundred; still exact in bf16
    const Results found = on_gpu(p, f32), expected = on_host(p);
    expect_lse(found.lse, expected.lse);
    expect_rows("o", found.o, expected.o);
    expect_rows("dv", found.dv, expected.dv);
  }
}

TEST_F(CudaAttention, BadOperandsAreRefused) {
  const Axis tokens = axis({{0, 70}});
  EXPECT_THROW(on_gpu(problem(tokens, tokens, {1, 1, 32})), Error);
  EXPECT_THROW(on_gpu(problem(tokens, tokens, {1, 17, 64})), Error);
  Problem p = problem(tokens, tokens, {1, 2, 64});
  p.k = random({71, 1, 64});
  EXPECT_THROW(on_gpu(p), Error);
}

}  // namespace
}  // namespace ballast::test
