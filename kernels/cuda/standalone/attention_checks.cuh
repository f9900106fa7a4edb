// Checks of the attention kernels against fp64: small cases, every path and option.
#pragma once
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/standalone/attention_problem.cuh"

namespace bench {

/// ||a - b|| / ||b||, infinities must agree; NaN never passes.
template <class A, class B>
double error(const std::vector<A>& a, const std::vector<B>& b) {
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = static_cast<double>(static_cast<float>(a[i])),
                 y = static_cast<double>(static_cast<float>(b[i]));
    if (std::isinf(y)) {
      if (x != y) return INFINITY;
      continue;
    }
    if (!std::isfinite(x)) return INFINITY;
    diff += (x - y) * (x - y);
    norm += y * y;
  }
  return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

struct Reference {
  std::vector<double> o, lse, dq, dk, dv;
};
inline Reference reference(Problem& p, const std::vector<std::int64_t>& rows, bool pairwise) {
  const std::int64_t n = static_cast<std::int64_t>(rows.size());
  Buffer<std::int64_t> ids(rows);
  Buffer<std::uint8_t> allowed(pairwise ? allowed_pairs(p.host) : std::vector<std::uint8_t>{});
  Buffer<double> probability(n * p.hq * p.host.k_tokens), ds(n * p.hq * p.host.k_tokens),
      o(n * p.hq * p.d), lse(n * p.hq), dq(n * p.hq * p.d), dk(p.dk.size), dv(p.dv.size);
  const AttentionForwardArgs a = p.forward_args(false);
  ReferenceProblem r{static_cast<const bf16*>(a.q),
                     static_cast<const bf16*>(a.k),
                     static_cast<const bf16*>(a.v),
                     p.dout.data,
                     a.q_stride,
                     a.k_stride,
                     a.v_stride,
                     p.hq * p.d,
                     p.host.q_tokens(),
                     p.host.k_tokens,
                     p.hq,
                     p.hkv,
                     p.d,
                     p.host.index_heads,
                     p.scale,
                     pairwise ? allowed.data : nullptr,
                     p.index.key_begin,
                     p.index.key_end,
                     ids.data,
                     n};
  reference_rows<<<dim3(static_cast<unsigned>(n), p.hq), 128>>>(r, probability.data, ds.data,
                                                                o.data, lse.data, dq.data);
  if (pairwise)
    reference_keys<<<dim3(static_cast<unsigned>(p.host.k_tokens), p.hkv), 128>>>(
        r, probability.data, ds.data, dk.data, dv.data);
  CHECK(cudaDeviceSynchronize());
  Reference out{o.host(), lse.host(), dq.host(), {}, {}};
  if (pairwise) {
    out.dk = dk.host();
    out.dv = dv.host();
  }
  return out;
}

inline int g_failures = 0;
inline void verdict(const char* name, const char* path, const double (&e)[5], double limit) {
  bool good = true;
  for (double x : e) good = good && x < limit;  // NaN fails
  if (!good) ++g_failures;
  static const auto start = std::chrono::steady_clock::now();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%6.1f s  %-46s %-14s o %.1e lse %.1e dq %.1e dk %.1e dv %.1e %s\n", seconds, name,
              path, e[0], e[1], e[2], e[3], e[4], good ? "ok" : "FAIL");
  std::fflush(stdout);
}

inline void check_case(const char* name, PatternArrays x, int hq, int hkv, int d) {
  Problem p(std::move(x), hq, hkv, d);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(p.host.q_tokens()));
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int64_t>(i);
  const Reference ref = reference(p, rows, true);
  struct Option {
    const char* name;
    AttentionPath path;
    bool fp32, deterministic, accumulate;
  };
  const Option options[] = {{"sm90", AttentionPath::sm90, true, false, false},
                            {"sm90 bf16 +=", AttentionPath::sm90, false, false, true},
                            {"sm90 determ.", AttentionPath::sm90, true, true, false},
                            {"plain", AttentionPath::plain, true, false, true}};
  for (const Option& option : options) {
    p.o16.poison();
    p.o32.poison();
    p.lse.poison();
    p.dq.poison();
    p.dk.poison();
    p.dv.poison();
    AttentionForwardArgs f = p.forward_args(option.fp32);
    f.path = option.path;
    CHECK(attention_forward(f, 0));
    CHECK(cudaDeviceSynchronize());
    AttentionBackwardArgs b = p.backward_args();
    b.path = option.path;
    b.o = f.o;
    b.o_fp32 = option.fp32;
    b.deterministic = option.deterministic;
    b.accumulate_dq = b.accumulate_dkv = option.accumulate;
    if (option.accumulate) {
      randomise(p.dq, g_seed++);
      randomise(p.dk, g_seed++);
      randomise(p.dv, g_seed++);
    }
    const std::vector<float> before[3] = {p.dq.host(), p.dk.host(), p.dv.host()};
    CHECK(attention_backward(b, 0));
    CHECK(cudaDeviceSynchronize());
    std::vector<float> after[3] = {p.dq.host(), p.dk.host(), p.dv.host()};
    for (int repeat = 0; option.deterministic && repeat < 3; ++repeat) {
      CHECK(attention_backward(b, 0));
      CHECK(cudaDeviceSynchronize());
      const std::vector<float> again[3] = {p.dq.host(), p.dk.host(), p.dv.host()};
      for (int i = 0; i < 3; ++i) {
        if (std::memcmp(again[i].data(), after[i].data(), again[i].size() * 4) != 0) {
          std::printf("%s: deterministic backward differs between runs\n", name);
          ++g_failures;
        }
      }
    }
    for (int i = 0; option.accumulate && i < 3; ++i) {
      for (std::size_t j = 0; j < after[i].size(); ++j) after[i][j] -= before[i][j];
    }
    const double e[5] = {option.fp32 ? error(p.o32.host(), ref.o) : error(p.o16.host(), ref.o),
                         error(p.lse.host(), ref.lse), error(after[0], ref.dq),
                         error(after[1], ref.dk), error(after[2], ref.dv)};
    verdict(name, option.name, e, 1e-2);
  }
}

inline std::set<int> random_blocks(std::mt19937& rng, int low, int high, double keep, int run) {
  std::set<int> s;
  for (int b = low; b < high; ++b) {
    if (rng() % 10000 < keep * 10000 / run) {
      for (int i = 0; i < run; ++i) s.insert(std::min(b + i, high - 1));
    }
  }
  if (high > low) s.insert(high - 1);
  return s;
}

/// Zigzag ring step: this rank's two pieces look at the keys of another rank's two pieces.
inline PatternArrays ring_step(int piece, int mine, int other, int ranks) {
  PatternArrays x;
  x.k_tokens = 2 * piece;
  const int q_piece[2] = {mine, 2 * ranks - 1 - mine}, k_piece[2] = {other, 2 * ranks - 1 - other};
  for (int i = 0; i < 2 * piece; ++i) {
    const int position = q_piece[i / piece] * piece + i % piece;
    int end = 0;
    for (int j = 0; j < 2; ++j) end += std::clamp(position + 1 - k_piece[j] * piece, 0, piece);
    x.visible.add(1, 0, end, 0);
  }
  dense_runs(x);
  return x;
}

/// Keys in two parts as in a ring: partial outputs merged (the second part is empty for many rows),
/// then backward part by part with the final output, LSE and a precomputed delta.
inline void check_ring(int hq, int hkv, int d, AttentionPath path) {
  const int tokens = 300, cut = 128;
  Problem p(dense({tokens}, tokens), hq, hkv, d);
  std::vector<std::int64_t> rows(tokens);
  for (int i = 0; i < tokens; ++i) rows[i] = i;
  const Reference ref = reference(p, rows, true);
  p.dq.poison();
  p.dk.poison();
  p.dv.poison();
  Buffer<float> part(p.o32.size), part_lse(p.lse.size), delta(p.lse.size);
  CHECK(cudaMemset(p.o32.data, 0, p.o32.size * 4));
  CHECK(cudaMemcpy(p.lse.data, std::vector<float>(p.lse.size, -INFINITY).data(), p.lse.size * 4,
                   cudaMemcpyHostToDevice));
  for (int pass = 0; pass < 2; ++pass) {  // forward, backward
    for (int step = 0; step < 2; ++step) {
      const int first = step == 0 ? 0 : cut, last = step == 0 ? cut : tokens;
      PatternArrays x;
      x.k_tokens = last - first;
      for (int i = 0; i < tokens; ++i)
        x.visible.add(1, 0, std::clamp(i + 1 - first, 0, last - first), 0);
      dense_runs(x);
      const IndexShape shape = shape_of(x, hq, hkv);
      Buffer<char> memory(static_cast<std::int64_t>(index_bytes(shape)));
      DeviceIndex index = bind_index(shape, memory.data);
      CHECK(upload_index(x, index, 0));
      CHECK(derive_index(index, 0));
      if (pass == 0) {
        part.poison();
        part_lse.poison();
        AttentionForwardArgs f = p.forward_args(true);
        f.k = static_cast<const bf16*>(f.k) + first * p.kv_stride;
        f.v = static_cast<const bf16*>(f.v) + first * p.kv_stride;
        f.o = part.data;
        f.lse = part_lse.data;
        f.index = &index;
        f.path = path;
        CHECK(attention_forward(f, 0));
        CHECK(attention_merge(p.o32.data, p.lse.data, part.data, part_lse.data, tokens, hq, d, 0));
      } else {
        CHECK(attention_delta(p.dout.data, hq * d, p.o32.data, hq * d, true, delta.data, tokens, hq,
                              d, 0));
        AttentionBackwardArgs b = p.backward_args();
        b.k = static_cast<const bf16*>(b.k) + first * p.kv_stride;
        b.v = static_cast<const bf16*>(b.v) + first * p.kv_stride;
        b.dk += first * b.dk_stride;
        b.dv += first * b.dv_stride;
        b.o = nullptr;
        b.delta = delta.data;
        b.accumulate_dq = step == 1;
        b.index = &index;
        b.path = path;
        CHECK(attention_backward(b, 0));
      }
      CHECK(cudaDeviceSynchronize());
    }
  }
  const double e[5] = {error(p.o32.host(), ref.o), error(p.lse.host(), ref.lse),
                       error(p.dq.host(), ref.dq), error(p.dk.host(), ref.dk),
                       error(p.dv.host(), ref.dv)};
  verdict("ring of two, merge, delta", path == AttentionPath::plain ? "plain" : "sm90", e, 1e-2);
}

/// Results do not tell by which way dQ came: short samples and long prefixes take different ones.
inline void check_modes() {
  using ballast::cuda::QueryGradient;
  const auto mode = [](int keys, int queries, int head_dim) {
    Problem p(dense({keys}, queries), 4, 2, head_dim);
    return ballast::cuda::query_gradient_mode(p.backward_args());
  };
  const bool good = mode(777, 777, 128) == QueryGradient::firsts &&
                    mode(777, 777, 64) == QueryGradient::adds &&
                    mode(9001, 333, 128) == QueryGradient::adds;
  if (!good) ++g_failures;
  std::printf("first additions to dQ are stores of short samples at D128 alone: %s\n",
              good ? "ok" : "FAIL");
}

/// Dense cases of a head dim: odd lengths, packed segments, steps of a ring.
inline void check_dense(int d) {
  std::printf("head dim %d\n", d);
  check_case("dense 1, 2/2 heads", dense({1}, 1), 2, 2, d);
  check_case("dense 63, 7/1 heads", dense({63}, 63), 7, 1, d);
  check_case("dense 777, 14/2 heads", dense({777}, 777), 14, 2, d);
  check_case("dense 3601, 4/1 heads", dense({3601}, 3601), 4, 1, d);
  check_case("packed 4000,100,2500, 2/1 heads", dense({4000, 100, 2500}, 6600), 2, 1, d);
  check_case("dense 515, 16/1 heads", dense({515}, 515), 16, 1, d);
  check_case("dense 600, 6/6 heads", dense({600}, 600), 6, 6, d);
  check_case("packed 0,1,300,64,1,5,257, 4/1 heads", dense({0, 1, 300, 64, 1, 5, 257}, 628), 4, 1,
             d);
  check_case("packed 1900,40,700,300, 16/2 heads", dense({1900, 40, 700, 300}, 2940), 16, 2, d);
  check_case("prefix: 200 queries over 713 keys, 8/2 heads", dense({100, 613}, 200), 8, 2, d);
  // Ranges of 64 query blocks and more, in which a backward unit begins where others are.
  check_case("dense 4501, 2/1 heads", dense({4501}, 4501), 2, 1, d);
  check_case("prefix: 4201 queries over 5001 keys, 4/2 heads", dense({5001}, 4201), 4, 2, d);
  // More keys a query than kFewKeys: first additions to dQ find zeros.
  check_case("prefix: 333 queries over 9001 keys, 4/2 heads", dense({9001}, 333), 4, 2, d);
  check_case("ring step, rows without keys, 6/2 heads", ring_step(150, 0, 1, 2), 6, 2, d);
  check_case("ring step, other way, 6/2 heads", ring_step(150, 1, 0, 2), 6, 2, d);
}
/// Lists, row masks and columns of a head dim.
inline void check_lists(int d, std::mt19937& rng, std::mt19937_64& rng64) {
  PatternArrays x = dense({1001}, 1001);
  list_runs(x, 1,
            [&](int, int, int low, int high) { return random_blocks(rng, low, high, 0.3, 1); });
  check_case("lists 1001, one for all, 8/2 heads", x, 8, 2, d);
  list_runs(x, 1, [&](int, int, int low, int high) {
    return rng() % 4 == 0 ? std::set<int>{} : random_blocks(rng, low, high, 0.3, 2);
  });
  check_case("lists 1001, some rows empty, 7/1 heads", x, 7, 1, d);
  PatternArrays y = dense({1001}, 1001);
  list_runs(y, 8,
            [&](int, int, int low, int high) { return random_blocks(rng, low, high, 0.3, 1); });
  check_case("lists 1001, one per head, 8/2 heads", y, 8, 2, d);
  add_columns(y, {0, 1001}, 150, rng);
  check_case("lists and columns 1001, one per head, 8/2 heads", y, 8, 2, d);
  PatternArrays z = dense({320, 64, 500}, 884);
  list_runs(z, 1,
            [&](int, int, int low, int high) { return random_blocks(rng, low, high, 0.3, 1); });
  add_row_masks(z, rng64);
  check_case("row masks, packed 320,64,500, 4/2 heads", z, 4, 2, d);
  PatternArrays w = dense({320, 64, 500}, 884);
  list_runs(w, 6,
            [&](int, int, int low, int high) { return random_blocks(rng, low, high, 0.2, 1); });
  add_columns(w, {0, 320, 384, 884}, 130, rng);
  check_case("columns per head, packed 320,64,500, 6/2 heads", w, 6, 2, d);
  PatternArrays u = dense({512}, 512);
  list_runs(u, 1, [&](int, int, int, int high) { return std::set<int>{high - 1}; });
  add_columns(u, {0, 512}, 200, rng);
  check_case("columns for all heads 512, 7/1 heads", u, 7, 1, d);
}

inline int run_checks(bool smoke) {
  std::mt19937 rng(7);
  std::mt19937_64 rng64(8);
  check_case("dense 256, 2/1 heads, D128", dense({256}, 256), 2, 1, 128);
  check_case("dense 130, 4/2 heads, D64", dense({130}, 130), 4, 2, 64);
  {
    PatternArrays x = dense({192, 128}, 320);
    list_runs(x, 1,
              [&](int, int, int low, int high) { return random_blocks(rng, low, high, 0.4, 1); });
    add_columns(x, {0, 192, 320}, 40, rng);
    check_case("lists and columns, two segments, 4/2 heads, D128", x, 4, 2, 128);
  }
  check_case("dense 200, 3/1 heads, D96", dense({200}, 200), 3, 1, 96);
  check_case("dense 200, 2/1 heads, D256", dense({200}, 200), 2, 1, 256);
  check_ring(4, 2, 128, AttentionPath::sm90);
  check_ring(3, 1, 64, AttentionPath::plain);
  check_modes();
  if (smoke) return g_failures;
  for (int d : {128, 64, 96, 256}) {
    check_dense(d);
    check_lists(d, rng, rng64);
  }
  return g_failures;
}

}  // namespace bench
