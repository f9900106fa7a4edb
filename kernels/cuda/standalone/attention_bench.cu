// Checks and times the CUDA attention kernels without the rest of Ballast (see build.sh).
//   attention_bench check [smoke]          small cases against fp64, every path and option; "smoke"
//   runs the first few attention_bench time [lengths.txt]     medians of the sizes that
//   docs/performance_attention.md reports
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "kernels/cuda/standalone/attention_problem.cuh"

using namespace bench;
using namespace ballast::cuda;

namespace {

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
Reference reference(Problem& p, const std::vector<std::int64_t>& rows, bool pairwise) {
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

int g_failures = 0;
void verdict(const char* name, const char* path, const double (&e)[5], double limit) {
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

void check_case(const char* name, PatternArrays x, int hq, int hkv, int d) {
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

std::set<int> random_blocks(std::mt19937& rng, int low, int high, double keep, int run) {
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
PatternArrays ring_step(int piece, int mine, int other, int ranks) {
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
void check_ring(int hq, int hkv, int d, AttentionPath path) {
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
  Buffer<bf16> rounded(p.dq.size);
  rounded.poison();
  CHECK(convert_to_bf16(p.dq.data, hq * d, rounded.data, hq * d, tokens, hq * d, 0));
  const double e[5] = {error(p.o32.host(), ref.o), error(p.lse.host(), ref.lse),
                       error(rounded.host(), ref.dq), error(p.dk.host(), ref.dk),
                       error(p.dv.host(), ref.dv)};
  verdict("ring of two, merge, delta, bf16 dQ", path == AttentionPath::plain ? "plain" : "sm90", e,
          1e-2);
}

int run_checks(bool smoke) {
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
  if (smoke) return g_failures;
  for (int d : {128, 64, 96, 256}) {
    std::printf("head dim %d\n", d);
    check_case("dense 1, 2/2 heads", dense({1}, 1), 2, 2, d);
    check_case("dense 63, 7/1 heads", dense({63}, 63), 7, 1, d);
    check_case("dense 777, 14/2 heads", dense({777}, 777), 14, 2, d);
    check_case("dense 3001, 8/1 heads", dense({3001}, 3001), 8, 1, d);
    check_case("dense 515, 16/1 heads", dense({515}, 515), 16, 1, d);
    check_case("dense 600, 6/6 heads", dense({600}, 600), 6, 6, d);
    check_case("packed 0,1,300,64,1,5,257, 4/1 heads", dense({0, 1, 300, 64, 1, 5, 257}, 628), 4, 1,
               d);
    check_case("packed 1900,40,700,300, 16/2 heads", dense({1900, 40, 700, 300}, 2940), 16, 2, d);
    check_case("prefix: 200 queries over 713 keys, 8/2 heads", dense({100, 613}, 200), 8, 2, d);
    check_case("ring step, rows without keys, 6/2 heads", ring_step(150, 0, 1, 2), 6, 2, d);
    check_case("ring step, other way, 6/2 heads", ring_step(150, 1, 0, 2), 6, 2, d);
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
  std::printf("%d failures\n", g_failures);
  return g_failures;
}

// --- timing
// -------------------------------------------------------------------------------------------------
struct Timing {
  double forward, backward, forward_flops;
};
Timing time_case(const char* name, PatternArrays x, int hq, int hkv, int d, bool verify) {
  const double pairs = pairs_per_head(x);
  Problem p(std::move(x), hq, hkv, d);
  const AttentionForwardArgs f = p.forward_args(false);  // bf16 output, as one GPU trains
  AttentionBackwardArgs b = p.backward_args();
  b.o = p.o16.data;
  b.o_fp32 = false;
  AttentionBackwardArgs det = b;
  det.deterministic = true;
  Timing t;
  t.forward_flops = 4.0 * d * hq * pairs;
  const double derive = median_ms([&] { CHECK(derive_index(p.index, 0)); }, 5);
  t.forward = median_ms([&] { CHECK(attention_forward(f, 0)); }, 9);
  t.backward = median_ms([&] { CHECK(attention_backward(b, 0)); }, 9);
  const double ordered = median_ms([&] { CHECK(attention_backward(det, 0)); }, 3);
  p.dk.poison();
  p.dv.poison();
  CHECK(attention_backward(det, 0));
  const std::vector<float> whole_dq = p.dq.host(), whole_dk = p.dk.host(), whole_dv = p.dv.host();
  CHECK(attention_backward(b, 0));  // leave the default result for the check below
  std::printf(
      "%-34s fwd %9.3f ms %6.1f TF/s | bwd %9.3f ms %6.1f TF/s | det %8.3f ms | index %7.3f ms",
      name, t.forward, t.forward_flops / t.forward / 1e9, t.backward,
      2.5 * t.forward_flops / t.backward / 1e9, ordered, derive);
  if (verify && p.shape.dense) {
    std::vector<std::int64_t> rows;
    for (int i = 0; i < 48; ++i) rows.push_back((p.host.q_tokens() - 1) * i / 47);
    const Reference ref = reference(p, rows, false);
    const std::vector<bf16> o = p.o16.host();
    const std::vector<float> lse = p.lse.host(), dq = p.dq.host();
    std::vector<bf16> o_rows;
    std::vector<float> lse_rows, dq_rows;
    for (std::int64_t r : rows) {
      o_rows.insert(o_rows.end(), o.begin() + r * hq * d, o.begin() + (r + 1) * hq * d);
      dq_rows.insert(dq_rows.end(), dq.begin() + r * hq * d, dq.begin() + (r + 1) * hq * d);
    }
    for (int h = 0; h < hq; ++h) {
      for (std::int64_t r : rows) lse_rows.push_back(lse[h * p.host.q_tokens() + r]);
    }
    // Default against deterministic.
    const double e[6] = {error(o_rows, ref.o),       error(lse_rows, ref.lse),
                         error(dq_rows, ref.dq),     error(p.dk.host(), whole_dk),
                         error(p.dv.host(), whole_dv), error(dq, whole_dq)};
    bool good = true;
    for (double x : e) good = good && x < 1e-2;
    if (!good) ++g_failures;
    std::printf(" | o %.1e lse %.1e dq %.1e | det dk %.0e dv %.0e dq %.0e%s", e[0], e[1], e[2], e[3],
                e[4], e[5], good ? "" : " FAIL");
  } else if (verify) {
    const std::vector<bf16> o = p.o16.host();
    const std::vector<float> dq = p.dq.host(), dk = p.dk.host(), dv = p.dv.host();
    AttentionForwardArgs plain = f;
    plain.path = AttentionPath::plain;
    det.path = AttentionPath::plain;
    CHECK(attention_forward(plain, 0));
    CHECK(attention_backward(det, 0));
    CHECK(cudaDeviceSynchronize());
    const double e[4] = {error(o, p.o16.host()), error(dq, p.dq.host()), error(dk, p.dk.host()),
                         error(dv, p.dv.host())};
    std::printf(" | against plain: o %.1e dq %.1e dk %.1e dv %.1e%s", e[0], e[1], e[2], e[3],
                e[0] < 2e-2 && e[1] < 2e-2 && e[2] < 2e-2 && e[3] < 2e-2 ? "" : " FAIL");
  }
  std::printf("\n");
  std::fflush(stdout);
  return t;
}

/// MTraining-like vertical slash, one pattern per head: local band, block diagonals, columns.
PatternArrays vertical_slash(int tokens, int heads, int local, int bands, int band, int columns,
                             std::mt19937& rng) {
  PatternArrays x = packed_index({tokens}, tokens);
  std::vector<std::vector<int>> offsets(heads);
  for (auto& o : offsets) {
    for (int i = 0; i < bands; ++i)
      o.push_back(local / kBlock + static_cast<int>(rng() % (tokens / kBlock - local / kBlock)));
  }
  list_runs(x, heads, [&](int h, int qb, int, int) {
    std::set<int> s;
    for (int i = 0; i < local / kBlock && i <= qb; ++i) s.insert(qb - i);
    for (int o : offsets[h]) {
      for (int i = 0; i < band / kBlock; ++i) {
        if (qb - o - i >= 0) s.insert(qb - o - i);
      }
    }
    return s;
  });
  add_columns(x, {0, tokens}, columns, rng);
  return x;
}

/// A pattern as MTraining's vertical slash, built on the GPU from its slashes and columns, then
/// attention under it; and what choosing slashes and columns by the last 64 queries costs.
void time_built(const char* name, int tokens, int hq, int hkv, int d, int local, int bands,
                int band, int columns, std::mt19937& rng) {
  const int slots = tokens / kBlock;
  std::vector<std::int32_t> slash_entries(static_cast<std::size_t>(hq) * slots),
      column_entries(static_cast<std::size_t>(hq) * tokens), slash_counts, column_counts;
  for (int h = 0; h < hq; ++h) {
    std::set<int> slashes, chosen;
    for (int i = 0; i < local / kBlock; ++i) slashes.insert(i);
    for (int b = 0; b < bands; ++b) {
      const int first = local / kBlock + static_cast<int>(rng() % (slots - local / kBlock));
      for (int i = 0; i < band / kBlock && first + i < slots; ++i) slashes.insert(first + i);
    }
    while (static_cast<int>(chosen.size()) < columns)
      chosen.insert(static_cast<int>(rng() % tokens));
    std::copy(slashes.begin(), slashes.end(),
              slash_entries.begin() + static_cast<std::ptrdiff_t>(h) * slots);
    std::copy(chosen.begin(), chosen.end(),
              column_entries.begin() + static_cast<std::ptrdiff_t>(h) * tokens);
    slash_counts.push_back(static_cast<int>(slashes.size()));
    column_counts.push_back(columns);
  }
  std::vector<std::int32_t> each(slots);
  for (int i = 0; i < slots; ++i) each[i] = i;
  const std::vector<std::uint8_t> whole = {0};
  Buffer<std::int32_t> segment(std::vector<std::int32_t>{0, slots}),
      zero(std::vector<std::int32_t>(slots, 0)), same(each);
  Buffer<std::uint8_t> whole_flags(whole);
  const PatternAxes axes{1,         slots,     segment.data, zero.data, whole_flags.data,
                         same.data, same.data, same.data};
  Buffer<std::int32_t> slash_list(slash_entries), column_list(column_entries),
      slash_count(slash_counts), column_count(column_counts);
  const PatternLists slash_lists{slash_list.data, slash_count.data, 1},
      column_lists{column_list.data, column_count.data, kBlock};

  Problem p(dense({tokens}, tokens), hq, hkv, d);
  const IndexShape shape =
      slash_shape(tokens, tokens, hq, hkv, {slash_counts, column_counts}, each, {0, slots}, whole);
  Buffer<char> memory(static_cast<std::int64_t>(index_bytes(shape))),
      scratch(static_cast<std::int64_t>(slash_scratch_bytes(hq, axes)));
  memory.poison();
  DeviceIndex index = bind_index(shape, memory.data);
  index.key_begin = p.index.key_begin;
  index.key_end = p.index.key_end;
  const auto convert = [&] {
    CHECK(build_slash_index(index, axes, slash_lists, column_lists, {}, scratch.data, 0));
    CHECK(derive_index(index, 0));
  };
  convert();
  Buffer<std::uint64_t> pairs(1);
  CHECK(cudaMemset(pairs.data, 0, 8));
  CHECK(count_pairs(index, pairs.data, 0));
  const double flops = 4.0 * d * static_cast<double>(pairs.host()[0]);
  AttentionForwardArgs f = p.forward_args(false);
  AttentionBackwardArgs b = p.backward_args();
  b.o = p.o16.data;
  b.o_fp32 = false;
  f.index = b.index = &index;
  Buffer<char> workspace(static_cast<std::int64_t>(
      std::max(attention_forward_workspace(f), attention_backward_workspace(b))));
  f.workspace = b.workspace = workspace.data;
  f.workspace_bytes = b.workspace_bytes = static_cast<std::size_t>(workspace.size);
  const double conversion = median_ms(convert, 9);
  const double both = median_ms(
      [&] {
        convert();
        CHECK(attention_forward(f, 0));
      },
      9);
  const double backward = median_ms([&] { CHECK(attention_backward(b, 0)); }, 9);

  std::vector<Interval> rows;
  for (int i = 0; i < kBlock; ++i) rows.push_back({0, tokens - kBlock + i + 1});
  Buffer<Interval> visible(rows);
  Buffer<std::int32_t> tile(std::vector<std::int32_t>{slots - 1});
  Buffer<bf16> queries(kBlock * hq * d);
  randomise(queries, g_seed++);
  const Observation seen{1,   tile.data, visible.data, queries.data, f.k, f.k_stride, tokens, hq,
                         hkv, d,         f.scale};
  Buffer<float> top(hq * kBlock);
  Buffer<std::int64_t> sum(hq * kBlock), mass(static_cast<std::int64_t>(hq) * slots * (1 + kBlock));
  Buffer<std::int32_t> chosen(static_cast<std::int64_t>(hq) * slots * (1 + kBlock)), counts(4 * hq);
  const double observe = median_ms(
      [&] {
        CHECK(cudaMemsetAsync(top.data, kBelowScores, top.size * 4, 0));
        CHECK(cudaMemsetAsync(sum.data, 0, sum.size * 8, 0));
        CHECK(cudaMemsetAsync(mass.data, 0, mass.size * 8, 0));
        CHECK(observe_maximum(seen, top.data, 0));
        CHECK(observe_sum(seen, top.data, sum.data, 0));
        CHECK(observe_mass(seen, axes, top.data, sum.data, mass.data + hq * slots, mass.data, 0));
      },
      9);
  const double select = median_ms(
      [&] {
        CHECK(select_heaviest(mass.data, hq, axes, {0.9, INT_MAX, true},
                              {chosen.data, counts.data, 1}, counts.data + 2 * hq, 0));
        CHECK(select_heaviest(mass.data + hq * slots, hq, axes, {0.9, INT_MAX, false},
                              {chosen.data + hq * slots, counts.data + hq, kBlock},
                              counts.data + 3 * hq, 0));
      },
      9);
  double total = 0;
  for (std::int64_t m : mass.host()) total += std::ldexp(static_cast<double>(m), -kMassBits);
  std::printf(
      "%-34s conversion %6.3f + fwd = %7.3f ms (fwd %6.1f TF/s) | bwd %8.3f ms %6.1f TF/s | "
      "observe %6.3f select %6.3f ms | index %.0f MiB | mass %.6f of %d\n",
      name, conversion, both, flops / (both - conversion) / 1e9, backward,
      2.5 * flops / backward / 1e9, observe, select, memory.size / 1048576.0, total,
      2 * kBlock * hq);
  if (std::fabs(total - 2.0 * kBlock * hq) > 1e-3 * kBlock * hq) ++g_failures;
  std::fflush(stdout);
}

PatternArrays block_list(int tokens, double keep, int run, bool align, std::mt19937& rng) {
  PatternArrays x = packed_index({tokens}, tokens);
  list_runs(x, 1, [&](int, int qb, int, int) {
    std::set<int> s;
    const int wanted = std::max(1, static_cast<int>(keep * qb));
    while (static_cast<int>(s.size()) < wanted) {
      int b = static_cast<int>(rng() % (qb + 1));
      if (align) b = b / run * run;
      for (int i = 0; i < run && b + i <= qb; ++i) s.insert(b + i);
    }
    s.insert(qb);
    return s;
  });
  return x;
}

/// Useful pairs over those in the tiles that the kernels compute: 64 x 128 keys forward, 128 keys x
/// 64 queries backward.  No kernel with these tiles gets a larger share of its rate on unmasked
/// tiles.
struct TileShare {
  double pairs = 0, forward = 0, backward = 0;
  void add(const PatternArrays& x) {
    std::vector<int> first(x.k_blocks(), INT_MAX), last(x.k_blocks(), -1);
    pairs += pairs_per_head(x);
    for (int b = 0; b < x.q_blocks(); ++b) {
      const std::int64_t row = std::min<std::int64_t>((b + 1) * kBlock, x.q_tokens()) - 1;
      const int low = x.visible.row(b * kBlock).begin / kBlock,
                high = (x.visible.row(row).end + kBlock - 1) / kBlock;
      forward += (high - low + 1) / 2 * 2.0 * kBlock * kBlock;
      for (int k = low; k < high; ++k) {
        first[k] = std::min(first[k], b);
        last[k] = b;
      }
    }
    for (std::size_t k = 0; k < first.size(); k += 2) {
      const std::size_t other = std::min(k + 1, first.size() - 1);
      backward +=
          std::max(0, std::max(last[k], last[other]) + 1 - std::min(first[k], first[other])) * 2.0 *
          kBlock * kBlock;
    }
  }
};

int run_times(const char* lengths_file, const std::string& only) {
  std::mt19937 rng(3);
  const auto wants = [&](const char* what) { return only.empty() || only == what; };
  Timing dense32{};
  if (wants("dense")) {
    time_case("dense 8K D128 16/2", dense({8192}, 8192), 16, 2, 128, true);
    dense32 = time_case("dense 32K D128 16/2", dense({32768}, 32768), 16, 2, 128, true);
    time_case("dense 32K D64 14/2", dense({32768}, 32768), 14, 2, 64, true);
    for (int d : {96, 256}) {
      for (int n : {8192, 32768}) {
        const std::string name = "dense " + std::to_string(n / 1024) + "K D" + std::to_string(d);
        time_case((name + " 16/2").c_str(), dense({n}, n), 16, 2, d, true);
      }
    }
    time_case("dense 8K D128 16/16", dense({8192}, 8192), 16, 16, 128, true);
    time_case("dense 128K D128 16/2", dense({131072}, 131072), 16, 2, 128, true);
  }
  std::ifstream file(lengths_file == nullptr ? "" : lengths_file);
  std::vector<int> lengths;
  for (int n; file >> n;) lengths.push_back(n);
  if (wants("packed") && !lengths.empty()) {
    Timing sum{};
    TileShare share;
    std::size_t at = 0;
    const int packs = 6;
    for (int pack = 0; pack < packs; ++pack) {
      std::vector<int> segments;
      int used = 0;
      while (used < 32768) {
        const int n = std::min(lengths[at++ % lengths.size()],
                               32768 - used);  // the last sample is cut to fill the pack
        segments.push_back(n);
        used += n;
      }
      share.add(dense(segments, 32768));
      const Timing t =
          time_case(("packed 32K, " + std::to_string(segments.size()) + " samples").c_str(),
                    dense(segments, 32768), 16, 2, 128, pack < 2);
      sum.forward += t.forward;
      sum.backward += t.backward;
      sum.forward_flops += t.forward_flops;
    }
    const double rate = 3.5 * sum.forward_flops / (sum.forward + sum.backward) / 1e9;
    std::printf("packed, all: fwd %.1f bwd %.1f both %.1f TF/s",
                sum.forward_flops / sum.forward / 1e9, 2.5 * sum.forward_flops / sum.backward / 1e9,
                rate);
    if (dense32.forward > 0)
      std::printf(" = %.3f of dense", rate / (3.5 * dense32.forward_flops /
                                              (dense32.forward + dense32.backward) / 1e9));
    std::printf("; useful share of tiles: fwd %.3f bwd %.3f\n", share.pairs / share.forward,
                share.pairs / share.backward);
  }
  if (wants("equal")) {
    for (int n : {16384, 4096, 1024, 256}) {
      const std::vector<int> segments(32768 / n, n);
      TileShare share;
      share.add(dense(segments, 32768));
      time_case(("32K, segments of " + std::to_string(n)).c_str(), dense(segments, 32768), 16, 2,
                128, false);
      std::printf("  useful share of tiles: fwd %.3f bwd %.3f\n", share.pairs / share.forward,
                  share.pairs / share.backward);
    }
  }
  if (wants("lists")) {
    time_case("5% of 32K, aligned runs of 2", block_list(32768, 0.05, 2, true, rng), 16, 2, 128,
              true);
    time_case("5% of 128K, aligned runs of 2", block_list(131072, 0.05, 2, true, rng), 16, 2, 128,
              false);
    time_case("5% of 128K, free runs of 2", block_list(131072, 0.05, 2, false, rng), 16, 2, 128,
              false);
    time_case("5% of 128K, single blocks", block_list(131072, 0.05, 1, false, rng), 16, 2, 128,
              false);
  }
  if (wants("columns")) {
    time_case("vertical slash 16K, per head", vertical_slash(16384, 16, 1024, 4, 256, 256, rng), 16,
              2, 128, true);
    time_case("vertical slash 128K, per head", vertical_slash(131072, 16, 1024, 12, 256, 1024, rng),
              16, 2, 128, false);
    time_case("vertical slash 256K, per head", vertical_slash(262144, 16, 1024, 12, 256, 1024, rng),
              16, 2, 128, false);
    time_built("vertical slash 128K, built here", 131072, 16, 2, 128, 1024, 12, 256, 1024, rng);
    time_built("vertical slash 256K, built here", 262144, 16, 2, 128, 1024, 12, 256, 1024, rng);
  }
  return g_failures;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc >= 2 && std::strcmp(argv[1], "check") == 0) return run_checks(argc > 2) != 0;
  if (argc >= 2 && std::strcmp(argv[1], "time") == 0)
    return run_times(argc > 2 ? argv[2] : nullptr, argc > 3 ? argv[3] : "") != 0;
  std::printf(
      "usage: attention_bench check [smoke] | time [lengths.txt "
      "[dense|packed|equal|lists|columns]]\n");
  return 2;
}
