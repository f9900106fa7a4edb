// Checks and times the CUDA attention kernels without the rest of Ballast (see build.sh).
//   attention_bench check [smoke|routed]     small cases against fp64, every path and option;
//                                            "smoke" runs the first few, "routed" routed lists
//   attention_bench time [lengths.txt [PART]]     medians of the sizes that
//                                            docs/performance_attention.md reports
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "kernels/cuda/standalone/attention_checks.cuh"
#include "kernels/cuda/standalone/routed_case.cuh"

using namespace bench;
using namespace ballast::cuda;

namespace {

// --- timing
// -------------------------------------------------------------------------------------------------
struct Timing {
  double forward, backward, forward_flops;
};
/// Large dense results: 48 rows against fp64, default gradients against deterministic ones.
void verify_dense(Problem& p, const std::vector<float> (&ordered)[3]) {
  std::vector<std::int64_t> rows;
  for (int i = 0; i < 48; ++i) rows.push_back((p.host.q_tokens() - 1) * i / 47);
  const Reference ref = reference(p, rows, false);
  const std::vector<bf16> o = p.o16.host();
  const std::vector<float> lse = p.lse.host(), dq = p.dq.host();
  std::vector<bf16> o_rows;
  std::vector<float> lse_rows, dq_rows;
  for (std::int64_t r : rows) {
    o_rows.insert(o_rows.end(), o.begin() + r * p.hq * p.d, o.begin() + (r + 1) * p.hq * p.d);
    dq_rows.insert(dq_rows.end(), dq.begin() + r * p.hq * p.d, dq.begin() + (r + 1) * p.hq * p.d);
  }
  for (int h = 0; h < p.hq; ++h) {
    for (std::int64_t r : rows) lse_rows.push_back(lse[h * p.host.q_tokens() + r]);
  }
  // Default against deterministic.
  const double e[6] = {error(o_rows, ref.o),           error(lse_rows, ref.lse),
                       error(dq_rows, ref.dq),         error(p.dk.host(), ordered[1]),
                       error(p.dv.host(), ordered[2]), error(dq, ordered[0])};
  bool good = true;
  for (double x : e) good = good && x < 1e-2;
  if (!good) ++g_failures;
  std::printf(" | o %.1e lse %.1e dq %.1e | det dk %.0e dv %.0e dq %.0e%s", e[0], e[1], e[2], e[3],
              e[4], e[5], good ? "" : " FAIL");
}
/// Large results with lists: against the plain path.
void verify_lists(Problem& p, AttentionForwardArgs plain, AttentionBackwardArgs det) {
  const std::vector<bf16> o = p.o16.host();
  const std::vector<float> dq = p.dq.host(), dk = p.dk.host(), dv = p.dv.host();
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
  const std::vector<float> ordered_gradients[3] = {p.dq.host(), p.dk.host(), p.dv.host()};
  CHECK(attention_backward(b, 0));  // leave the default result for the check below
  std::printf(
      "%-34s fwd %9.3f ms %6.1f TF/s | bwd %9.3f ms %6.1f TF/s | det %8.3f ms | index %7.3f ms",
      name, t.forward, t.forward_flops / t.forward / 1e9, t.backward,
      2.5 * t.forward_flops / t.backward / 1e9, ordered, derive);
  if (verify && p.shape.dense) verify_dense(p, ordered_gradients);
  if (verify && !p.shape.dense) verify_lists(p, f, det);
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
    while (std::ssize(chosen) < columns) chosen.insert(static_cast<int>(rng() % tokens));
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
  Buffer<std::int32_t> chosen(static_cast<std::int64_t>(hq) * slots * (1 + kBlock)), counts(3 * hq);
  Buffer<float> cut_shares(hq);
  const ListCuts cuts{counts.data + 2 * hq, cut_shares.data};
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
                              {chosen.data, counts.data, 1}, cuts, 0));
        CHECK(select_heaviest(mass.data + hq * slots, hq, axes, {0.9, INT_MAX, false},
                              {chosen.data + hq * slots, counts.data + hq, kBlock}, cuts, 0));
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
  g_failures += std::fabs(total - 2.0 * kBlock * hq) > 1e-3 * kBlock * hq;
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

/// Returns the time of 32K at head dim 128.
Timing time_dense() {
  time_case("dense 8K D128 16/2", dense({8192}, 8192), 16, 2, 128, true);
  const Timing dense32 = time_case("dense 32K D128 16/2", dense({32768}, 32768), 16, 2, 128, true);
  time_case("dense 8K D64 14/2", dense({8192}, 8192), 14, 2, 64, true);
  time_case("dense 32K D64 14/2", dense({32768}, 32768), 14, 2, 64, true);
  time_case("dense 4K D256 16/2", dense({4096}, 4096), 16, 2, 256, true);
  for (int d : {96, 256}) {
    for (int n : {8192, 32768}) {
      const std::string name = "dense " + std::to_string(n / 1024) + "K D" + std::to_string(d);
      time_case((name + " 16/2").c_str(), dense({n}, n), 16, 2, d, true);
    }
  }
  time_case("dense 8K D128 16/16", dense({8192}, 8192), 16, 16, 128, true);
  time_case("dense 128K D128 16/2", dense({131072}, 131072), 16, 2, 128, true);
  return dense32;
}

/// Six packs of 32K; `dense32`: the time of one such sample, zeros where it was not measured.
void time_packed(const std::vector<int>& lengths, const Timing& dense32) {
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
    std::printf(" = %.3f of dense",
                rate / (3.5 * dense32.forward_flops / (dense32.forward + dense32.backward) / 1e9));
  std::printf("; useful share of tiles: fwd %.3f bwd %.3f\n", share.pairs / share.forward,
              share.pairs / share.backward);
}

void time_equal_segments() {
  for (int n : {16384, 4096, 1024, 256}) {
    const std::vector<int> segments(32768 / n, n);
    TileShare share;
    share.add(dense(segments, 32768));
    time_case(("32K, segments of " + std::to_string(n)).c_str(), dense(segments, 32768), 16, 2, 128,
              false);
    std::printf("  useful share of tiles: fwd %.3f bwd %.3f\n", share.pairs / share.forward,
                share.pairs / share.backward);
  }
  const auto of_1024 = [](const char* name, int tokens, int q_heads, int kv_heads, int head_dim) {
    time_case(name, dense(std::vector<int>(tokens / 1024, 1024), tokens), q_heads, kv_heads,
              head_dim, true);
  };
  of_1024("8K, segments of 1024", 8192, 16, 2, 128);
  of_1024("32K D64 14/2, segments of 1024", 32768, 14, 2, 64);
  of_1024("32K 32/8, segments of 1024", 32768, 32, 8, 128);
  of_1024("32K 16/16, segments of 1024", 32768, 16, 16, 128);
}

/// Queries behind keys that all of them see, as chunks of a long sample have them.
void time_prefixes() {
  for (const auto& [before, queries] :
       {std::pair{16384, 16384}, {49152, 16384}, {49152, 32768}, {122880, 8192}}) {
    const std::string name = std::to_string(queries / 1024) + "K queries after " +
                             std::to_string(before / 1024) + "K keys";
    time_case(name.c_str(), dense({before + queries}, queries), 16, 2, 128, true);
  }
  time_case("8K queries after 24K keys, 16/16", dense({32768}, 8192), 16, 16, 128, false);
}

int run_times(const char* lengths_file, const std::string& only) {
  std::mt19937 rng(3);
  const auto wants = [&](const char* what) { return only.empty() || only == what; };
  Timing dense32{};
  if (wants("dense")) dense32 = time_dense();
  std::ifstream file(lengths_file == nullptr ? "" : lengths_file);
  std::vector<int> lengths;
  for (int n; file >> n;) lengths.push_back(n);
  if (wants("packed") && !lengths.empty()) time_packed(lengths, dense32);
  if (wants("equal")) time_equal_segments();
  if (wants("prefix")) time_prefixes();
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
  if (argc >= 2 && std::strcmp(argv[1], "check") == 0) {
    const std::string only = argc > 2 ? argv[2] : "";
    std::mt19937 rng(9);
    if (only != "routed") run_checks(only == "smoke");
    if (only != "smoke") check_all_routed(rng);
    std::printf("%d failures\n", g_failures);
    return g_failures != 0;
  }
  if (argc >= 2 && std::strcmp(argv[1], "time") == 0)
    return run_times(argc > 2 ? argv[2] : nullptr, argc > 3 ? argv[3] : "") +
               (argc < 4 || std::strcmp(argv[3], "routed") == 0 ? time_all_routed() : 0) !=
           0;
  std::printf(
      "usage: attention_bench check [smoke|routed] | time [lengths.txt "
      "[dense|packed|equal|prefix|lists|columns|routed]]\n");
  return 2;
}
