// Attention over routed lists (MoBA): checks against fp64 and the host's lists, and its time beside
// dense attention and beside the same pattern as block lists with row masks.
#pragma once
#include <algorithm>
#include <numeric>

#include "core/plan/attention/routed_lists.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/routed_index.hpp"
#include "kernels/cuda/standalone/attention_checks.cuh"

namespace bench {

/// Segments on an axis padded to 64, in pattern blocks.
struct RoutedSegments {
  int block, slots, blocks = 0, width = 1;
  std::vector<int> lengths;
  std::vector<std::int32_t> first, own, rows, block_key, block_keys;
  RoutedSegments(std::vector<int> tokens, int block_tokens, int most)
      : block(block_tokens), slots(most), lengths(std::move(tokens)) {
    for (int n : lengths) {
      const int count = (n + block - 1) / block, start = static_cast<int>(own.size()) * kBlock;
      for (int i = 0; i < n; i += kBlock) {
        first.push_back(blocks);
        own.push_back(blocks + i / block);
        rows.push_back(std::min(kBlock, n - i));
      }
      for (int j = 0; j < count; ++j) {
        block_key.push_back(start + j * block);
        block_keys.push_back(std::min(block, n - j * block));
      }
      blocks += count;
      width = std::max(width, count);
    }
  }
  int tokens() const { return static_cast<int>(own.size()) * kBlock; }
  ballast::RoutedAxis axis(int q_heads, int kv_heads) const {
    return {q_heads, kv_heads, blocks, width, slots, first, own};
  }
  /// Keys that a row sees: of its segment, or those that it does not list.
  PatternArrays visible(bool unlisted) const {
    PatternArrays x;
    x.k_tokens = tokens();
    int start = 0;
    for (int n : lengths) {
      for (int i = 0; i < (n + kBlock - 1) / kBlock * kBlock; ++i)
        x.visible.add(
            1,
            start + (i >= n                                                     ? n
                     : unlisted && ballast::listed_blocks(i / block, slots) > 0 ? i / block * block
                                                                                : 0),
            start + std::min(i + 1, n), 0);
      start += (n + kBlock - 1) / kBlock * kBlock;
    }
    dense_runs(x);
    return x;
  }
  /// words as route_queries() leaves them: every row all its blocks, or so many of them at random.
  std::vector<std::uint64_t> random_words(int heads, std::mt19937& rng) const {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(heads) * own.size() * width, 0);
    std::vector<int> order;
    for (std::size_t list = 0; list < heads * own.size(); ++list) {
      const std::size_t b = list % own.size();
      const int before = own[b] - first[b];
      for (int row = 0; row < rows[b]; ++row) {
        order.resize(before);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), rng);
        order.resize(std::min(before, slots));
        order.push_back(before);
        for (int j : order) words[list * width + j] |= 1ull << row;
      }
    }
    return words;
  }
  /// The same as block lists with row masks.
  PatternArrays lists(int heads, const std::vector<std::uint64_t>& words) const {
    PatternArrays x = visible(false);
    x.index_heads = heads;
    x.runs.clear();
    x.run_offset = {0};
    for (std::size_t list = 0; list < heads * own.size(); ++list) {
      const std::size_t b = list % own.size();
      for (int kb = block_key[first[b]] / kBlock; kb <= static_cast<int>(b); ++kb) {
        const std::uint64_t word = words[list * width + own[kb] - first[b]];
        if (word == 0) continue;
        x.row_masks.push_back(word);
        x.runs.push_back({kb, kb + 1, static_cast<int>(x.row_masks.size()) - 1});
      }
      x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    }
    return x;
  }
};

/// Routed lists on the device, and the index of what rows do not list.
struct RoutedDevice {
  Buffer<std::int32_t> first, own, rows, block_key, block_keys;
  PatternArrays own_host;
  IndexShape own_shape;
  Buffer<char> own_memory;
  DeviceIndex own_index;
  RoutedWork work;
  Buffer<std::uint64_t> words;
  Buffer<std::uint32_t> base;
  char* memory = nullptr;
  std::size_t bytes = 0;

  RoutedDevice(const RoutedSegments& s, int hq, int hkv)
      : first(s.first),
        own(s.own),
        rows(s.rows),
        block_key(s.block_key),
        block_keys(s.block_keys),
        own_host(s.visible(true)),
        own_shape(shape_of(own_host, hq, hkv)),
        own_memory(static_cast<std::int64_t>(index_bytes(own_shape))),
        own_index(bind_index(own_shape, own_memory.data)),
        words(static_cast<std::int64_t>(hq) * s.own.size() * s.width),
        base(words.size) {
    own_memory.poison();
    CHECK(upload_index(own_host, own_index, 0));
    CHECK(derive_index(own_index, 0));
    RoutedIndex& x = work.index;
    x.q_tokens = s.tokens();
    x.q_heads = hq;
    x.kv_heads = hkv;
    x.blocks = s.blocks;
    x.width = s.width;
    x.slots = s.slots;
    x.block_tokens = s.block;
    x.queries = queries();
    x.block_key = block_key.data;
    work.chunk_begin = routed_chunks(s.axis(hq, hkv), s.rows);
    bytes = routed_bytes(work);
    CHECK(cudaMalloc(&memory, bytes));
    CHECK(cudaMemset(memory, 0xFF, bytes));
    bind_routed(work, memory);
  }
  RoutedDevice(const RoutedDevice&) = delete;
  ~RoutedDevice() { cudaFree(memory); }
  BlockRows queries() const {
    return {static_cast<int>(own.size), first.data, own.data, rows.data};
  }
  void build() { CHECK(build_routed(work, words.data, base.data, 0)); }
};

template <class T>
std::vector<T> downloaded(const T* from, std::int64_t n) {
  std::vector<T> v(static_cast<std::size_t>(n));
  if (n > 0) CHECK(cudaMemcpy(v.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

/// The device's lists against the host's.
inline void check_lists_of(const char* name, const RoutedSegments& s, const RoutedDevice& device,
                           const std::vector<std::uint64_t>& words) {
  const RoutedIndex& x = device.work.index;
  const ballast::RoutedLists lists = ballast::routed_lists(s.axis(x.q_heads, x.kv_heads), words);
  bool same = device.work.entries() == static_cast<std::int64_t>(lists.entries.size()) &&
              downloaded(x.offset, x.lists() + 1) == lists.offset &&
              downloaded(x.entries, device.work.entries()) == lists.entries;
  const auto places = downloaded(x.places, static_cast<std::int64_t>(lists.places.size()));
  for (std::size_t i = 0; i < places.size(); ++i)
    same = same && (lists.places[i] < 0 || places[i] == lists.places[i]);
  const auto unit_offset = downloaded(x.unit_offset, x.lists() + 1);
  const auto units = downloaded(x.units, unit_offset.back());
  for (int list = 0; list < x.lists(); ++list) {
    std::int64_t at = lists.offset[list];
    for (std::int64_t u = unit_offset[list]; u < unit_offset[list + 1]; ++u) {
      const RoutedUnit& unit = units[u];
      same = same && unit.begin == at && unit.rows > 0 && unit.rows <= ballast::kRoutedUnit &&
             unit.kv_head == list / x.blocks % x.kv_heads &&
             unit.key == s.block_key[list % x.blocks];
      at += unit.rows;
    }
    same = same && at == lists.offset[list + 1];
  }
  if (!same) {
    std::printf("%s: the device's lists differ from the host's\n", name);
    ++g_failures;
  }
}

inline void check_routed(const char* name, const RoutedSegments& s, int hq, int hkv, int d,
                         std::mt19937& rng) {
  const std::vector<std::uint64_t> words = s.random_words(hq, rng);
  Problem p(s.lists(hq, words), hq, hkv, d);
  RoutedDevice device(s, hq, hkv);
  CHECK(cudaMemcpy(device.words.data, words.data(), words.size() * 8, cudaMemcpyHostToDevice));
  device.build();
  CHECK(cudaDeviceSynchronize());
  check_lists_of(name, s, device, words);
  std::vector<std::int64_t> all(static_cast<std::size_t>(s.tokens()));
  std::iota(all.begin(), all.end(), 0);
  const Reference ref = reference(p, all, true);
  for (const bool fp32 : {true, false}) {
    p.o16.poison();
    p.o32.poison();
    p.lse.poison();
    p.dq.poison();
    p.dk.poison();
    p.dv.poison();
    AttentionForwardArgs f = p.forward_args(fp32);
    AttentionBackwardArgs b = p.backward_args();
    f.index = b.index = &device.own_index;
    f.routed = b.routed = &device.work;
    b.o = f.o;
    b.o_fp32 = fp32;
    b.accumulate_dq = b.accumulate_dkv = !fp32;
    Buffer<char> workspace(static_cast<std::int64_t>(
        std::max(attention_forward_workspace(f), attention_backward_workspace(b))));
    workspace.poison();
    f.workspace = b.workspace = workspace.data;
    f.workspace_bytes = b.workspace_bytes = static_cast<std::size_t>(workspace.size);
    CHECK(attention_forward(f, 0));
    CHECK(cudaDeviceSynchronize());
    if (!fp32) {
      randomise(p.dq, g_seed++);
      randomise(p.dk, g_seed++);
      randomise(p.dv, g_seed++);
    }
    const std::vector<float> before[3] = {p.dq.host(), p.dk.host(), p.dv.host()};
    workspace.poison();
    CHECK(attention_backward(b, 0));
    CHECK(cudaDeviceSynchronize());
    std::vector<float> after[3] = {p.dq.host(), p.dk.host(), p.dv.host()};
    for (int i = 0; !fp32 && i < 3; ++i)
      for (std::size_t j = 0; j < after[i].size(); ++j) after[i][j] -= before[i][j];
    const double e[5] = {fp32 ? error(p.o32.host(), ref.o) : error(p.o16.host(), ref.o),
                         error(p.lse.host(), ref.lse), error(after[0], ref.dq),
                         error(after[1], ref.dk), error(after[2], ref.dv)};
    verdict(name, fp32 ? "routed" : "routed bf16 +=", e, 1e-2);
  }
}

inline void check_all_routed(std::mt19937& rng) {
  for (int d : {128, 64}) {
    check_routed("moba 256/4, 2500,700,64,1, 4/1 heads", {{2500, 700, 64, 1}, 256, 3}, 4, 1, d,
                 rng);
    check_routed("moba 128/6, 1900, 6/2 heads", {{1900}, 128, 5}, 6, 2, d, rng);
  }
  // More rows than one unit holds, several chunks of queries, more slots than lanes.
  check_routed("moba 128/41, 9000, 2/1 heads", {{9000}, 128, 40}, 2, 1, 128, rng);
}

/// The results of a routed problem against those of block lists with row masks on the same data,
/// and the lists' times.
inline void compare_lists(Problem& p, PatternArrays lists) {
  const std::vector<bf16> o = p.o16.host();
  const std::vector<float> lse = p.lse.host(), dq = p.dq.host(), dk = p.dk.host(), dv = p.dv.host();
  const std::uint64_t seed = g_seed;
  g_seed -= 3;  // q, k, v and dO of the problem before
  Problem x(std::move(lists), p.hq, p.hkv, p.d);
  g_seed = seed;
  const AttentionForwardArgs f = x.forward_args(false);
  AttentionBackwardArgs b = x.backward_args();
  b.o = x.o16.data;
  b.o_fp32 = false;
  const double derive = median_ms([&] { CHECK(derive_index(x.index, 0)); }, 3),
               forward = median_ms([&] { CHECK(attention_forward(f, 0)); }, 3),
               backward = median_ms([&] { CHECK(attention_backward(b, 0)); }, 3);
  const double e[5] = {error(o, x.o16.host()), error(lse, x.lse.host()), error(dq, x.dq.host()),
                       error(dk, x.dk.host()), error(dv, x.dv.host())};
  bool good = true;
  for (double y : e) good = good && y < 1e-2;
  if (!good) ++g_failures;
  std::printf(
      "  as block lists: derive %.2f forward %.2f backward %.2f ms, index %.0f MiB | difference: o "
      "%.1e lse %.1e dq %.1e dk %.1e dv %.1e%s\n",
      derive, forward, backward, x.index_buffer.size / 1048576.0, e[0], e[1], e[2], e[3], e[4],
      good ? "" : " FAIL");
  std::fflush(stdout);
}

struct ChoiceTimes {
  double pool, route, lists;
};
/// Pools keys, routes queries and builds the lists of a problem's q and k.
inline ChoiceTimes time_choice(const AttentionForwardArgs& f, const RoutedSegments& s,
                               RoutedDevice& device, int top_k) {
  const int columns = f.kv_heads * f.head_dim;
  Buffer<std::int64_t> sums(static_cast<std::int64_t>(s.blocks) * columns);
  Buffer<bf16> high(sums.size), low(sums.size);
  const Routing routing{f.q,       f.q_stride, s.tokens(), high.data,        low.data,
                        f.q_heads, f.kv_heads, f.head_dim, device.queries(), s.width};
  ChoiceTimes t;
  t.pool = median_ms(
      [&] {
        CHECK(cudaMemsetAsync(sums.data, 0, sums.size * 8, 0));
        CHECK(pool_keys(f.k, f.k_stride, columns, device.queries(), sums.data, 0));
        CHECK(mean_keys(sums.data, device.block_keys.data, s.blocks, columns, high.data, low.data,
                        0));
      },
      3);
  t.route = median_ms([&] { CHECK(route_queries(routing, top_k, device.words.data, 0)); }, 3);
  t.lists = median_ms([&] { device.build(); }, 3);
  check_lists_of("time", s, device, device.words.host());
  return t;
}

/// One layer's attention under MoBA, choice included, beside dense attention of the same run; with
/// `listed` also beside block lists with row masks.
inline void time_routed(int tokens, int hq, int hkv, int d, int block, int top_k, bool listed) {
  const RoutedSegments s({tokens}, block, top_k - 1);
  Problem p(dense({tokens}, tokens), hq, hkv, d);
  RoutedDevice device(s, hq, hkv);
  AttentionForwardArgs f = p.forward_args(false);
  AttentionBackwardArgs b = p.backward_args();
  b.o = p.o16.data;
  b.o_fp32 = false;
  const auto forward_ms = [&] { return median_ms([&] { CHECK(attention_forward(f, 0)); }, 5); };
  const auto backward_ms = [&] { return median_ms([&] { CHECK(attention_backward(b, 0)); }, 5); };
  const double dense_forward = forward_ms(), dense_backward = backward_ms();
  const ChoiceTimes choice = time_choice(f, s, device, top_k);
  f.index = b.index = &device.own_index;
  const double own_forward = forward_ms(), own_backward = backward_ms();
  f.routed = b.routed = &device.work;
  Buffer<char> workspace(static_cast<std::int64_t>(
      std::max(attention_forward_workspace(f), attention_backward_workspace(b))));
  f.workspace = b.workspace = workspace.data;
  f.workspace_bytes = b.workspace_bytes = static_cast<std::size_t>(workspace.size);
  const double forward = forward_ms(), backward = backward_ms();
  const double pairs = static_cast<double>(device.work.entries()) * block / hq,
               flops = 4.0 * d * hq * pairs;
  std::printf(
      "moba %d/%d, %dK, %d/%d heads, D %d: dense %.2f + %.2f ms | pool %.3f route %.3f lists %.3f "
      "| forward %.2f (own %.2f; rest %.0f TF/s) | backward %.2f (own %.2f; rest %.0f TF/s) | "
      "dense / moba = %.2f | kept %.3f of the pairs | index %.0f MiB, workspace %.0f MiB\n",
      block, top_k, tokens / 1024, hq, hkv, d, dense_forward, dense_backward, choice.pool,
      choice.route, choice.lists, forward, own_forward, flops / (forward - own_forward) / 1e9,
      backward, own_backward, 2.5 * flops / (backward - own_backward) / 1e9,
      (dense_forward + dense_backward) /
          (choice.pool + choice.route + choice.lists + forward + backward),
      (pairs + device.own_host.visible.pairs()) / s.visible(false).visible.pairs(),
      device.bytes / 1048576.0, workspace.size / 1048576.0);
  std::fflush(stdout);
  if (listed) compare_lists(p, s.lists(hq, device.words.host()));
}

inline int time_all_routed() {
  time_routed(8192, 16, 2, 128, 256, 4, true);
  time_routed(8192, 16, 2, 128, 256, 12, true);
  time_routed(8192, 16, 2, 128, 256, 20, true);
  time_routed(8192, 16, 2, 128, 256, 28, true);
  time_routed(16384, 16, 2, 128, 256, 32, true);
  time_routed(32768, 16, 2, 128, 256, 16, true);
  time_routed(32768, 14, 2, 64, 256, 16, true);
  time_routed(32768, 16, 2, 128, 128, 32, true);
  time_routed(65536, 16, 2, 128, 256, 32, false);
  time_routed(131072, 16, 2, 128, 256, 32, true);
  return g_failures;
}

}  // namespace bench
