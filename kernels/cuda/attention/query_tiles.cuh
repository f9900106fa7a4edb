// The query-stationary half of the sm_90 kernels: a producer thread that streams the key blocks of
// two 64-row query tiles through a ring in shared memory, and what a consumer needs to read a tile.
// Forward and the deterministic dQ use it.
#pragma once
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/attention/tiles.cuh"

namespace ballast::cuda {
using namespace hopper;

inline constexpr int kQueryThreads = 384;  // producer warpgroup, two consumer warpgroups
inline constexpr int kConsumerArrivals = 8 * kWarpArrivals;  // of the consumers' 8 warps

/// Which work there is.  An item is two (query block, head) pairs; see DeviceIndex::pairs_heads().
struct QueryWork {
  DeviceIndex index;
  int group;  // query heads per key head
  int inner;  // work items per unit of the index
  int turn;   // work items of a unit before the next unit
  int items;
  bool pairs_heads;
  int* counter;
};
inline QueryWork query_work(const DeviceIndex& index, int* counter) {
  QueryWork w;
  w.index = index;
  w.group = index.shape.q_heads / index.shape.kv_heads;
  w.pairs_heads = index.pairs_heads();
  w.inner = w.pairs_heads                  ? index.shape.q_heads / 2
            : index.shape.index_heads == 1 ? index.shape.q_heads
                                           : 1;
  w.turn = index.key_heads_in_turn() && w.inner % index.shape.kv_heads == 0
               ? w.inner / index.shape.kv_heads
               : w.inner;
  w.items = static_cast<int>(index.forward_units()) * w.inner;
  w.counter = counter;
  return w;
}

struct KeyMaps {
  CUtensorMap k, v, column_k, column_v;
};

/// What the two consumers compute for one work item; query_block[0] < 0 ends the kernel.
struct WorkItem {
  int query_block[2];
  int head[2];
  int index_head[2];
};

struct TileInfo {
  std::uint16_t
      state[2];  // per consumer: HalfState of the first half, 256 * that of the second, or kEnd
  int columns;   // keys count in the column list instead of the key axis
  int key[2];    // first key of either half
  std::uint64_t word[2][2];  // row mask, or cover word when columns: [consumer][half]
};
constexpr int kAllSkip = 0, kAllWhole = kWhole | kWhole << 8;
constexpr int kEnd = 0xFFFF;  // no data: the work item is complete

/// Ring of key tiles.  A stage holds the K and V of two 64-key blocks from anywhere.
template <int D, int kStages_>
struct KeyRing {
  static constexpr int kStages = kStages_;
  static constexpr int kBoxes = D / 64;  // 128-byte columns of a row
  static constexpr int kBlockBytes = kBlock * D * 2;
  static constexpr int kTileBytes = 2 * kBlockBytes;  // 128 keys
  static constexpr int kBoxStride =
      kKeyTile * 128;  // distance of the two 64-column halves of K and V
  alignas(1024) unsigned char k[kStages][kTileBytes];
  alignas(1024) unsigned char v[kStages][kTileBytes];
  std::uint64_t k_full[kStages], v_full[kStages], empty[kStages], q_full, q_empty;
  TileInfo tile[kStages];
  WorkItem work;
  // The producer's own, kept out of its few registers:
  int next_item;
  RunCursor cursor[2];

  __device__ void init() {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&k_full[s], 1);
      barrier_init(&v_full[s], 1);
      barrier_init(&empty[s], kConsumerArrivals);
    }
    barrier_init(&q_full, 1);
    barrier_init(&q_empty, kConsumerArrivals);
    barrier_init_fence();
  }
};

// --- producer
// -------------------------------------------------------------------------------------------------
template <class Shared>
struct KeyProducer {
  Shared& sh;
  const KeyMaps& maps;
  RingPosition<Shared::kStages> ring;
  int half = 0;

  __device__ KeyProducer(Shared& s, const KeyMaps& m) : sh(s), maps(m) {}

  __device__ void open_stage() { barrier_wait(&sh.empty[ring.stage], ring.parity ^ 1); }
  __device__ void load_half(bool columns, int kv_head, int token) {
    const int s = ring.stage;
    barrier_expect(&sh.k_full[s], Shared::kBlockBytes);
    barrier_expect(&sh.v_full[s], Shared::kBlockBytes);
    const CUtensorMap* k = columns ? &maps.column_k : &maps.k;
    const CUtensorMap* v = columns ? &maps.column_v : &maps.v;
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.k[s] + c * Shared::kBoxStride + half * kBlock * 128, k, &sh.k_full[s], c * 64,
               kv_head, token);
    }
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.v[s] + c * Shared::kBoxStride + half * kBlock * 128, v, &sh.v_full[s], c * 64,
               kv_head, token);
    }
  }
  __device__ void close_stage() {
    barrier_arrive(&sh.k_full[ring.stage]);
    barrier_arrive(&sh.v_full[ring.stage]);
    ring.advance();
    half = 0;
  }
  /// One 64-key block for both consumers: `key` counts as the masks count, `token` is the row to
  /// load.
  __device__ void block(bool columns, int kv_head, int token, int key, HalfState s0, HalfState s1,
                        std::uint64_t w0, std::uint64_t w1) {
    if (half == 0) open_stage();
    TileInfo& t = sh.tile[ring.stage];
    if (half == 0) {
      t.columns = columns;
      t.state[0] = s0;
      t.state[1] = s1;
    } else {
      t.state[0] |= s0 << 8;
      t.state[1] |= s1 << 8;
    }
    t.key[half] = key;
    t.word[0][half] = w0;
    t.word[1][half] = w1;
    load_half(columns, kv_head, token);
    if (++half == 2) close_stage();
  }
  /// Completes a stage that has one block: the other half is loaded from beyond the tensor, which
  /// writes zeros.
  __device__ void flush() {
    if (half == 0) return;
    load_half(false, 0, INT_MAX - kBlock);
    close_stage();
  }
  __device__ void end() {
    open_stage();
    sh.tile[ring.stage].state[0] = sh.tile[ring.stage].state[1] = kEnd;
    close_stage();
  }
};

__device__ inline WorkItem decode(const QueryWork& p, int item) {
  // Of one unit, p.turn query heads follow each other; with key heads in turn, all units pass
  // before the next p.turn.
  const int units = p.items / p.inner, position = item / p.turn;
  const int unit = p.index.forward_order[position % units];
  const int inner = position / units * p.turn + item % p.turn;
  WorkItem w;
  if (p.pairs_heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      w.query_block[i] = unit;
      w.head[i] = 2 * inner + i;
      w.index_head[i] = 0;
    }
  } else {
    const int pairs = (static_cast<int>(p.index.shape.q_blocks()) + 1) / 2;
    const int index_head = unit / pairs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      w.query_block[i] = 2 * (unit % pairs) + i;
      w.head[i] = p.index.shape.index_heads == 1 ? inner : index_head;
      w.index_head[i] = index_head;
    }
  }
  return w;
}

template <class Shared>
__device__ void produce_blocks(KeyProducer<Shared>& out, const QueryWork& p, const WorkItem& w) {
  const DeviceIndex& index = p.index;
  const int kv_head = w.head[0] / p.group;
  const bool second = w.query_block[1] < index.shape.q_blocks();
  const BlockBounds bounds0 = index.bounds[w.query_block[0]];
  const BlockBounds bounds1 =
      second ? index.bounds[w.query_block[1]] : BlockBounds{INT_MAX, INT_MAX, 0, 0};
  RunCursor& a = out.sh.cursor[0];
  RunCursor& b = out.sh.cursor[1];
  open_query_block(a, index, w.index_head[0], w.query_block[0]);
  if (p.pairs_heads) {
    b.open_empty();
  } else {
    open_query_block(b, index, w.index_head[1], w.query_block[1]);
  }
  while (true) {
    const int kb = min(a.block, b.block);
    if (kb == INT_MAX) break;
    int mask0 = kAbsent, mask1 = kAbsent;
    if (a.block == kb) {
      mask0 = a.mask;
      a.pop();
    }
    if (b.block == kb) {
      mask1 = b.mask;
      b.pop();
    }
    if (p.pairs_heads) mask1 = mask0;
    const int key = kb * kBlock;
    HalfState s0 = mask0 == kAbsent ? kSkip : visible_state(bounds0, key);
    HalfState s1 = mask1 == kAbsent ? kSkip : visible_state(bounds1, key);
    if (s0 == kSkip && s1 == kSkip) continue;
    std::uint64_t w0 = kAllRows, w1 = kAllRows;
    if (mask0 >= 0 && s0 != kSkip) {
      w0 = index.row_masks[mask0];
      s0 = kMasked;
    }
    if (mask1 >= 0 && s1 != kSkip) {
      w1 = index.row_masks[mask1];
      s1 = kMasked;
    }
    out.block(false, kv_head, key, key, s0, s1, w0, w1);
  }
  out.flush();
}

/// The columns of consumer `from` and, if `both`, of the other consumer, whose list is the same.
template <class Shared>
__device__ void produce_columns(KeyProducer<Shared>& out, const QueryWork& p, const WorkItem& w,
                                int from, bool both) {
  const DeviceIndex& index = p.index;
  const int h = w.index_head[from];
  const int list = h * index.shape.segments + index.block_segment[w.query_block[from]];
  const int first_row = index.column_row_offset[list];
  const int kv_head = index.shape.index_heads == 1 ? w.head[0] / p.group : 0;
  const BlockBounds bounds = column_block_bounds(index, h, w.query_block[from]);
  const BlockBounds other = both ? column_block_bounds(index, h, w.query_block[1]) : bounds;
  const int groups = (max(bounds.end_last, both ? other.end_last : 0) + kBlock - 1) / kBlock;
  for (int g = min(bounds.begin_first, other.begin_first) / kBlock; g < groups; ++g) {
    const int key = g * kBlock;
    HalfState s[2] = {kSkip, kSkip};
    std::uint64_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i != from && !both) continue;
      s[i] = visible_state(i == from ? bounds : other, key);
      if (s[i] == kSkip) continue;
      word[i] = cover_word(index, h, w.query_block[i], g);
      if (word[i] == kAllRows) s[i] = kSkip;
      if (word[i] != 0 && s[i] == kWhole) s[i] = kMasked;
    }
    if (s[0] == kSkip && s[1] == kSkip) continue;
    out.block(true, kv_head, first_row + key, key, s[0], s[1], word[0], word[1]);
  }
  out.flush();
}

/// The producer's life.  load_queries(work item) announces and loads the query tiles on sh.q_full;
/// a query block past the end reads zeros and is never written.
template <class Shared, class LoadQueries>
__device__ void produce(Shared& sh, const KeyMaps& maps, const QueryWork& p,
                        LoadQueries load_queries) {
  KeyProducer<Shared> out(sh, maps);
  int q_parity = 1;
  int item = atomicAdd(p.counter, 1);
  while (true) {
    if (item < p.items)
      sh.next_item = atomicAdd(p.counter, 1);  // its latency hides behind this item
    barrier_wait(&sh.q_empty, q_parity);
    q_parity ^= 1;
    if (item >= p.items) {
      sh.work.query_block[0] = -1;
      barrier_arrive(&sh.q_full);
      return;
    }
    sh.work = decode(p, item);
    const WorkItem& w = sh.work;
    load_queries(w);
    barrier_arrive(&sh.q_full);
    produce_blocks(out, p, w);
    if (p.index.has_columns()) {
      if (p.pairs_heads) {
        produce_columns(out, p, w, 0, true);
      } else {
        const bool second = w.query_block[1] < p.index.shape.q_blocks();
        const bool same = second && p.index.block_segment[w.query_block[0]] ==
                                        p.index.block_segment[w.query_block[1]];
        produce_columns(out, p, w, 0, same);
        if (second && !same) produce_columns(out, p, w, 1, false);
      }
    }
    out.end();
    item = sh.next_item;
  }
}

// --- consumer
// -------------------------------------------------------------------------------------------------
/// Sets masked scores of one 64-key half to -inf.  allowed0 / allowed1: columns of the thread's two
/// rows.
template <int kHalf, int N>
__device__ __forceinline__ void mask_half(float (&s)[N], std::uint64_t allowed0,
                                          std::uint64_t allowed1, int lane) {
  allowed0 >>= 2 * (lane % 4);
  allowed1 >>= 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!(allowed0 >> (8 * j + e) & 1)) s[kHalf * 32 + 4 * j + e] = -INFINITY;
      if (!(allowed1 >> (8 * j + e) & 1)) s[kHalf * 32 + 4 * j + 2 + e] = -INFINITY;
    }
  }
}

/// Columns of one half that a row may see, as bits.  r: row inside the query block.
__device__ __forceinline__ std::uint64_t allowed_columns(const TileInfo& t, int consumer, int state,
                                                         int half, Interval seen, int r) {
  if (state == kSkip) return 0;
  if (state == kWhole) return ~0ull;
  const std::uint64_t word = t.word[consumer][half];
  const std::uint64_t bits = interval_bits(seen.begin - t.key[half], seen.end - t.key[half]);
  if (t.columns) return bits & ~word;
  return (word >> r & 1) ? bits : 0;
}

/// Host: maps of K, V and the gathered columns.
template <class Args>
cudaError_t make_key_maps(KeyMaps& maps, const Args& a, const AttentionScratch& scratch) {
  const DeviceIndex& index = *a.index;
  const std::int64_t tokens = index.shape.k_tokens;
  cudaError_t e = make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, tokens, a.k_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, tokens, a.v_stride);
  maps.column_k = maps.k;
  maps.column_v = maps.v;
  if (e != cudaSuccess || !index.has_columns()) return e;
  const int heads = index.column_heads();
  e = make_tensor_map(&maps.column_k, scratch.column_k, false, a.head_dim, heads,
                      index.column_rows(), heads * a.head_dim);
  if (e != cudaSuccess) return e;
  return make_tensor_map(&maps.column_v, scratch.column_v, false, a.head_dim, heads,
                         index.column_rows(), heads * a.head_dim);
}

/// Host: launches a persistent kernel of one CTA a multiprocessor (at most `items`) with `bytes` of
/// shared memory.
template <class Kernel, class... Params>
cudaError_t launch_persistent(Kernel kernel, int bytes, int items, cudaStream_t stream,
                              const Params&... params) {
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const int ctas = items < processors ? items : processors;
  kernel<<<ctas, kQueryThreads, bytes, stream>>>(params...);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
