// The query-stationary half of the sm_90 kernels: a producer thread that streams the key blocks of
// the consumers' 64-row query tiles through a ring in shared memory, and what a consumer needs to
// read a tile.  Forward and the dQ of lists use it.
#pragma once
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/attention/tiles.cuh"

namespace ballast::cuda {
using namespace hopper;

/// Which work there is.  An item is as many (query block, head) pairs as the kernel has consumers.
struct QueryWork {
  enum Grouping {
    heads,   // two heads of one query block: shared lists, an even group
    blocks,  // two neighbouring query blocks of one head
    rows     // three of the (query block, head of the group) in this order: dense
  };
  DeviceIndex index;
  const std::int32_t* order;  // units of the index
  int group;                  // query heads per key head
  int units;                  // of the index
  int inner;                  // work items per unit
  int turn;                   // work items of a unit before the next unit
  int items;
  Grouping grouping;
  int* counter;
};
inline QueryWork query_work(const DeviceIndex& index, int head_dim, int consumers, int* counter) {
  QueryWork w;
  const IndexShape& s = index.shape;
  w.index = index;
  w.group = s.q_heads / s.kv_heads;
  w.grouping = consumers == 3        ? QueryWork::rows
               : index.pairs_heads() ? QueryWork::heads
                                     : QueryWork::blocks;
  w.order = consumers == 3 ? index.triple_order : index.forward_order;
  w.units = static_cast<int>(consumers == 3 ? index.triple_units() : index.forward_units());
  w.inner = w.grouping == QueryWork::rows    ? s.kv_heads
            : w.grouping == QueryWork::heads ? s.q_heads / 2
            : s.index_heads == 1             ? s.q_heads
                                             : 1;
  w.turn = index.key_heads_in_turn(head_dim) && w.inner % s.kv_heads == 0 ? w.inner / s.kv_heads
                                                                          : w.inner;
  w.items = w.units * w.inner;
  w.counter = counter;
  return w;
}

struct KeyMaps {
  CUtensorMap k, v, column_k, column_v;
};

/// What the consumers compute for one work item; query_block[0] < 0 ends the kernel.
template <int kConsumers>
struct WorkItem {
  int query_block[kConsumers];
  int head[kConsumers];
  int index_head[kConsumers];
};

template <int kConsumers>
struct TileInfo {
  std::uint16_t
      state[kConsumers];  // HalfState of the first half, 256 * that of the second, or kEnd
  int columns;            // keys count in the column list instead of the key axis
  int key[2];             // first key of either half
  std::uint64_t word[kConsumers][2];  // row mask, or cover word when columns: [consumer][half]
};
constexpr int kAllSkip = 0, kAllWhole = kWhole | kWhole << 8;
constexpr int kEnd = 0xFFFF;  // no data: the work item is complete

/// 64-key blocks of a tile: at head dim 256 one.
constexpr int tile_halves(int d) { return d > 128 ? 1 : 2; }

/// Ring of key tiles.  A stage holds the K and V of kHalves 64-key blocks from anywhere.  kSplit: K
/// and V of a stage are given back one by one, K through k_empty.
template <int D, int kStages_, int kConsumers_ = 2, int kHalves_ = 2, bool kSplit_ = false>
struct KeyRing {
  static constexpr int kStages = kStages_, kConsumers = kConsumers_, kHalves = kHalves_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kBoxes = (D + 63) / 64;  // 128-byte columns of a row; the last may be padded
  static constexpr int kBlockBytes = kBlock * kBoxes * 128;
  static constexpr int kTileBytes = kHalves * kBlockBytes;
  static constexpr int kBoxStride =
      kHalves * kBlock * 128;  // distance of the 64-column parts of K and V
  static constexpr int kThreads = 128 * (1 + kConsumers);
  /// Items that may be known at a time: one a stage, as an item whose queries see no key is its end
  /// marker alone, and the one that waits for a stage.
  static constexpr int kWorkSlots = kStages + 1;
  alignas(1024) unsigned char k[kStages][kTileBytes];
  alignas(1024) unsigned char v[kStages][kTileBytes];
  std::uint64_t k_full[kStages], v_full[kStages], empty[kStages], k_empty[kStages], q_full, q_empty,
      work_full[kWorkSlots];
  TileInfo<kConsumers> tile[kStages];
  WorkItem<kConsumers> work[kWorkSlots];
  // The producer's own, kept out of its few registers:
  RunCursor cursor[kConsumers];
  BlockBounds bounds[kConsumers];
  Interval seen, whole;  // keys that some, and that all rows see
  int kv_head;

  __device__ void init() {
    constexpr int kArrivals = 4 * kConsumers * kWarpArrivals;
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&k_full[s], 1);
      barrier_init(&v_full[s], 1);
      barrier_init(&empty[s], kArrivals);
      barrier_init(&k_empty[s], kArrivals);
    }
    barrier_init(&q_full, 1);
    barrier_init(&q_empty, kArrivals);
    for (auto& full : work_full) barrier_init(&full, 1);
    barrier_init_fence();
  }
  /// A consumer's warps give back a stage, or its K alone and then the rest.
  __device__ __forceinline__ void release_keys(int s) {
    if constexpr (kSplit) warp_arrive(&k_empty[s]);
  }
  __device__ __forceinline__ void release(int s) { warp_arrive(&empty[s]); }
};

// --- producer
// -------------------------------------------------------------------------------------------------
template <class Shared>
struct KeyProducer {
  static constexpr int kConsumers = Shared::kConsumers;
  Shared& sh;
  const KeyMaps& maps;
  RingPosition<Shared::kStages> ring;
  int half = 0;

  __device__ KeyProducer(Shared& s, const KeyMaps& m) : sh(s), maps(m) {}

  __device__ void open_stage() {
    barrier_wait(Shared::kSplit ? &sh.k_empty[ring.stage] : &sh.empty[ring.stage], ring.parity ^ 1);
  }
  __device__ void open_values() {
    if constexpr (Shared::kSplit) barrier_wait(&sh.empty[ring.stage], ring.parity ^ 1);
  }
  /// K and V of `halves` blocks from row `token` on, to the stage's half `at`.  One load takes all
  /// halves where the maps' boxes are as high (make_key_maps).
  __device__ void load(bool columns, int kv_head, int token, int at, int halves) {
    const int s = ring.stage, bytes = halves * Shared::kBlockBytes;
    const CUtensorMap* k = columns ? &maps.column_k : &maps.k;
    const CUtensorMap* v = columns ? &maps.column_v : &maps.v;
    barrier_expect(&sh.k_full[s], bytes);
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.k[s] + c * Shared::kBoxStride + at * kBlock * 128, k, &sh.k_full[s], c * 64,
               kv_head, token);
    }
    open_values();
    barrier_expect(&sh.v_full[s], bytes);
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.v[s] + c * Shared::kBoxStride + at * kBlock * 128, v, &sh.v_full[s], c * 64,
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
    auto& t = sh.tile[ring.stage];
    if (half == 0) {
      // A single half counts as both: that is what all whole, or all skipped, means.
      t.columns = columns;
      t.state[0] = Shared::kHalves == 1 ? s0 | s0 << 8 : s0;
      t.state[1] = Shared::kHalves == 1 ? s1 | s1 << 8 : s1;
    } else {
      t.state[0] |= s0 << 8;
      t.state[1] |= s1 << 8;
    }
    t.key[half] = key;
    t.word[0][half] = w0;
    t.word[1][half] = w1;
    load(columns, kv_head, token, half, 1);
    if (++half == Shared::kHalves) close_stage();
  }
  /// Completes a stage that has one block: the other half is loaded from beyond the tensor, which
  /// writes zeros.
  __device__ void flush() {
    if (half == 0) return;
    load(false, 0, INT_MAX - kBlock, half, 1);
    close_stage();
  }
  __device__ void end() {
    open_stage();
    open_values();
    for (auto& state : sh.tile[ring.stage].state) state = kEnd;
    close_stage();
  }
};

template <int kConsumers>
__device__ inline void decode(WorkItem<kConsumers>& w, const QueryWork& p, int item) {
  // Of one unit, p.turn items follow each other; with key heads in turn, all units pass before the
  // next p.turn.
  const int position = item / p.turn, unit = p.order[position % p.units];
  const int inner = position / p.units * p.turn + item % p.turn;
  if (kConsumers == 3) {
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      w.query_block[i] = (3 * unit + i) / p.group;
      w.head[i] = inner * p.group + (3 * unit + i) % p.group;
      w.index_head[i] = 0;
    }
  } else if (p.grouping == QueryWork::heads) {
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      w.query_block[i] = unit;
      w.head[i] = 2 * inner + i;
      w.index_head[i] = 0;
    }
  } else {
    const int pairs = (static_cast<int>(p.index.shape.q_blocks()) + 1) / 2;
    const int index_head = unit / pairs;
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      w.query_block[i] = 2 * (unit % pairs) + i;
      w.head[i] = p.index.shape.index_heads == 1 ? inner : index_head;
      w.index_head[i] = index_head;
    }
  }
}

/// Bounds of the consumers' query blocks, in shared memory; a block past the end sees nothing.
template <class Shared, class Work>
__device__ void find_bounds(Shared& sh, const Work& w, const DeviceIndex& index) {
#pragma unroll
  for (int i = 0; i < Shared::kConsumers; ++i) {
    const int qb = w.query_block[i];
    sh.bounds[i] =
        qb < index.shape.q_blocks() ? index.bounds[qb] : BlockBounds{INT_MAX, INT_MAX, 0, 0};
  }
}

/// The keys of a dense index, in tiles of neighbouring blocks.
template <class Shared, class Work>
__device__ void produce_dense(KeyProducer<Shared>& out, const QueryWork& p, const Work& w) {
  constexpr int kConsumers = Shared::kConsumers, kKeys = Shared::kHalves * kBlock;
  Shared& sh = out.sh;
  find_bounds(sh, w, p.index);
  int first = INT_MAX, last = 0, whole_from = 0, whole_to = INT_MAX;
#pragma unroll
  for (int i = 0; i < kConsumers; ++i) {
    const BlockBounds b = sh.bounds[i];
    if (b.begin_first == INT_MAX) continue;
    first = min(first, b.begin_first);
    last = max(last, b.end_last);
    whole_from = max(whole_from, b.begin_last);
    whole_to = min(whole_to, b.end_first);
  }
  sh.seen = {first, last};
  sh.whole = {whole_from, whole_to};
  sh.kv_head = w.head[0] / p.group;
  for (int key = first / kBlock * kBlock; key < sh.seen.end; key += kKeys) {
    out.open_stage();
    TileInfo<kConsumers>& t = sh.tile[out.ring.stage];
    const bool whole = key >= sh.whole.begin && key + kKeys <= sh.whole.end;
    t.columns = false;
    t.key[0] = key;
    t.key[1] = key + kBlock;
#pragma unroll 1
    for (int i = 0; i < kConsumers; ++i) {
      int state = kAllWhole;
      if (!whole) {
        const HalfState s = visible_state(sh.bounds[i], key);
        state = s | (Shared::kHalves == 1 ? s : visible_state(sh.bounds[i], key + kBlock)) << 8;
        t.word[i][0] = t.word[i][1] = kAllRows;
      }
      t.state[i] = state;
    }
    out.load(false, sh.kv_head, key, 0, Shared::kHalves);
    out.close_stage();
  }
}

/// The lists of two consumers, block by block.  A shared list is walked once.
template <class Shared, class Work>
__device__ void produce_blocks(KeyProducer<Shared>& out, const QueryWork& p, const Work& w) {
  const DeviceIndex& index = p.index;
  const int kv_head = w.head[0] / p.group;
  const bool shared = p.grouping == QueryWork::heads,
             second = w.query_block[1] < index.shape.q_blocks();
  const BlockBounds bounds0 = index.bounds[w.query_block[0]];
  const BlockBounds bounds1 =
      second ? index.bounds[w.query_block[1]] : BlockBounds{INT_MAX, INT_MAX, 0, 0};
  RunCursor& a = out.sh.cursor[0];
  RunCursor& b = out.sh.cursor[1];
  open_query_block(a, index, w.index_head[0], w.query_block[0]);
  if (shared) {
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
    if (shared) mask1 = mask0;
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
template <class Shared, class Work>
__device__ void produce_columns(KeyProducer<Shared>& out, const QueryWork& p, const Work& w,
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
/// Columns of both consumers, together where they have one list.
template <class Shared, class Work>
__device__ void produce_all_columns(KeyProducer<Shared>& out, const QueryWork& p, const Work& w) {
  if (p.grouping == QueryWork::heads) return produce_columns(out, p, w, 0, true);
  const bool second = w.query_block[1] < p.index.shape.q_blocks();
  const bool same =
      second && p.index.block_segment[w.query_block[0]] == p.index.block_segment[w.query_block[1]];
  produce_columns(out, p, w, 0, same);
  if (second && !same) produce_columns(out, p, w, 1, false);
}

/// The producer's life: keys, as far ahead as the ring allows, also of the next item.
template <class Shared>
__device__ void produce(Shared& sh, const KeyMaps& maps, const QueryWork& p) {
  KeyProducer<Shared> out(sh, maps);
  int item = atomicAdd(p.counter, 1);
  for (int slot = 0;; slot = (slot + 1) % Shared::kWorkSlots) {
    auto& w = sh.work[slot];
    const bool done = item >= p.items;
    if (done) {
      w.query_block[0] = -1;
    } else {
      decode(w, p, item);
    }
    barrier_arrive(&sh.work_full[slot]);
    if (done) return;
    if constexpr (Shared::kConsumers == 3) {
      produce_dense(out, p, w);
    } else if (p.index.shape.dense) {
      produce_dense(out, p, w);
    } else {
      produce_blocks(out, p, w);
      if (p.index.has_columns()) produce_all_columns(out, p, w);
    }
    // Claimed only now, while the consumers still have tiles: the last items go to whoever is free.
    item = atomicAdd(p.counter, 1);
    out.end();
  }
}
/// Another thread's life, in the producer's warpgroup: queries, as soon as those before have been
/// read.  load_queries(work item) announces and loads the query tiles on sh.q_full; a query block
/// past the end reads zeros and is never written.
template <class Shared, class LoadQueries>
__device__ void fetch_queries(Shared& sh, LoadQueries load_queries) {
  for (int n = 0;; ++n) {
    const int slot = n % Shared::kWorkSlots;
    barrier_wait(&sh.work_full[slot], n / Shared::kWorkSlots % 2);
    barrier_wait(&sh.q_empty, n % 2 ^ 1);
    const bool done = sh.work[slot].query_block[0] < 0;
    if (!done) load_queries(sh.work[slot]);
    barrier_arrive(&sh.q_full);
    if (done) return;
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
template <class Tile>
__device__ __forceinline__ std::uint64_t allowed_columns(const Tile& t, int consumer, int state,
                                                         int half, Interval seen, int r) {
  if (state == kSkip) return 0;
  if (state == kWhole) return ~0ull;
  const std::uint64_t word = t.word[consumer][half];
  const std::uint64_t bits = interval_bits(seen.begin - t.key[half], seen.end - t.key[half]);
  if (t.columns) return bits & ~word;
  return (word >> r & 1) ? bits : 0;
}

/// Host: maps of K, V and the gathered columns.  Boxes hold the keys of a whole tile where an index
/// is dense, so that one load takes them, else of one block.
template <class Shared, class Args>
cudaError_t make_key_maps(KeyMaps& maps, const Args& a, const AttentionScratch& scratch) {
  const DeviceIndex& index = *a.index;
  const std::int64_t tokens = index.shape.k_tokens;
  const int rows = index.shape.dense ? Shared::kHalves * kBlock : kBlock;
  cudaError_t e =
      make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, tokens, a.k_stride, rows);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, tokens, a.v_stride, rows);
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

/// Host: launches a persistent kernel of one CTA a multiprocessor (at most `items`).
template <class Shared, class Kernel, class... Params>
cudaError_t launch_persistent(Kernel kernel, int items, cudaStream_t stream,
                              const Params&... params) {
  static_assert(sizeof(Shared) <= 232448);
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e != cudaSuccess) return e;
  const int ctas = items < processors ? items : processors;
  kernel<<<ctas, Shared::kThreads, sizeof(Shared), stream>>>(params...);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
