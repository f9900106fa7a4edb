// Attention forward on Hopper: wgmma, TMA and a persistent grid.
//
// A CTA has one producer warp and two consumer warpgroups; each consumer owns 64 query rows.  Where query heads share a key
// head and a list, the two consumers take two heads of one query block, so any list is used without waste; otherwise they
// take two neighbouring query blocks of one head and walk the union of their lists.  A stage of the ring holds the K and V
// of two 64-key blocks *from anywhere*: block lists, gathered columns and dense attention run the same inner loop.
// Inside a consumer the score product of stage j + 1 is issued before P V of stage j, so the softmax of one stage runs
// while the tensor cores work on the other (FlashAttention-3, Shah et al. 2024, Section 3.2).
#include "kernels/cuda/attention_launch.hpp"
#include "kernels/cuda/attention_tiles.cuh"

namespace ballast::cuda {
namespace {
using namespace hopper;

constexpr int kThreads = 384;  // producer warpgroup, two consumer warpgroups
constexpr int kConsumerWarps = 8;

struct ForwardParams {
  DeviceIndex index;
  int group;      // query heads per key head
  int inner;      // work items per unit of the index
  int turn;       // work items of a unit before the next unit
  int items;
  bool pairs_heads;
  float scale, scale_log2;
  void* o;
  std::int64_t o_stride;
  bool o_fp32;
  float* lse;
  int* counter;
};

struct ForwardMaps {
  CUtensorMap q, k, v, bar_k, bar_v;
};

/// What the two consumers compute for one work item; query_block[0] < 0 ends the kernel.
struct WorkItem {
  int query_block[2];
  int head[2];
  int index_head[2];
};

struct TileInfo {
  std::uint16_t state[2];       // per consumer: HalfState of the first half, 256 * that of the second, or kEnd
  int bars;                     // keys count in the bar list instead of the key axis
  int key[2];                   // first key of either half
  std::uint64_t word[2][2];     // row mask, or cover word when bars: [consumer][half]
};
constexpr int kAllSkip = 0, kAllWhole = kWhole | kWhole << 8;
constexpr int kEnd = 0xFFFF;    // no data: the work item is complete

template <int D>
struct ForwardShared {
  static constexpr int kStages = D == 128 ? 3 : 5;
  static constexpr int kBoxes = D / 64;                 // 128-byte columns of a row
  static constexpr int kBlockBytes = kBlock * D * 2;
  static constexpr int kTileBytes = 2 * kBlockBytes;    // 128 keys
  static constexpr int kBoxStride = kKeyTile * 128;     // distance of the two 64-column halves of K and V
  alignas(1024) unsigned char q[2][kBlockBytes];
  alignas(1024) unsigned char k[kStages][kTileBytes];
  alignas(1024) unsigned char v[kStages][kTileBytes];
  std::uint64_t k_full[kStages], v_full[kStages], empty[kStages], q_full, q_empty;
  TileInfo tile[kStages];
  WorkItem work;
  // The producer's own, kept out of its few registers:
  int next_item;
  RunCursor cursor[2];
};

// --- producer -------------------------------------------------------------------------------------------------------
template <int D>
struct Producer {
  using Shared = ForwardShared<D>;
  Shared& sh;
  const ForwardMaps& maps;
  RingPosition<Shared::kStages> ring;
  int half = 0;

  __device__ Producer(Shared& s, const ForwardMaps& m) : sh(s), maps(m) {}

  __device__ void open_stage() { barrier_wait(&sh.empty[ring.stage], ring.parity ^ 1); }
  __device__ void load_half(bool bars, int kv_head, int token) {
    const int s = ring.stage;
    barrier_expect(&sh.k_full[s], Shared::kBlockBytes);
    barrier_expect(&sh.v_full[s], Shared::kBlockBytes);
    const CUtensorMap* k = bars ? &maps.bar_k : &maps.k;
    const CUtensorMap* v = bars ? &maps.bar_v : &maps.v;
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.k[s] + c * Shared::kBoxStride + half * kBlock * 128, k, &sh.k_full[s], c * 64, kv_head, token);
    }
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.v[s] + c * Shared::kBoxStride + half * kBlock * 128, v, &sh.v_full[s], c * 64, kv_head, token);
    }
  }
  __device__ void close_stage() {
    barrier_arrive(&sh.k_full[ring.stage]);
    barrier_arrive(&sh.v_full[ring.stage]);
    ring.advance();
    half = 0;
  }
  /// One 64-key block for both consumers: `key` counts as the masks count, `token` is the row to load.
  __device__ void block(bool bars, int kv_head, int token, int key, HalfState s0, HalfState s1, std::uint64_t w0,
                        std::uint64_t w1) {
    if (half == 0) open_stage();
    TileInfo& t = sh.tile[ring.stage];
    if (half == 0) {
      t.bars = bars;
      t.state[0] = s0;
      t.state[1] = s1;
    } else {
      t.state[0] |= s0 << 8;
      t.state[1] |= s1 << 8;
    }
    t.key[half] = key;
    t.word[0][half] = w0;
    t.word[1][half] = w1;
    load_half(bars, kv_head, token);
    if (++half == 2) close_stage();
  }
  /// Completes a stage that has one block: the other half is loaded from beyond the tensor, which writes zeros.
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

__device__ WorkItem decode(const ForwardParams& p, int item) {
  // Of one unit, p.turn query heads follow each other; with key heads in turn, all units pass before the next p.turn.
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

template <int D>
__device__ void produce_blocks(Producer<D>& out, const ForwardParams& p, const WorkItem& w) {
  const DeviceIndex& index = p.index;
  const int kv_head = w.head[0] / p.group;
  const bool second = w.query_block[1] < index.shape.q_blocks();
  const BlockBounds bounds0 = index.bounds[w.query_block[0]];
  const BlockBounds bounds1 = second ? index.bounds[w.query_block[1]] : BlockBounds{INT_MAX, INT_MAX, 0, 0};
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

/// The bars of consumer `from` and, if `both`, of the other consumer, whose list is the same.
template <int D>
__device__ void produce_bars(Producer<D>& out, const ForwardParams& p, const WorkItem& w, int from, bool both) {
  const DeviceIndex& index = p.index;
  const int h = w.index_head[from];
  const int list = h * index.shape.segments + index.block_segment[w.query_block[from]];
  const int first_row = index.bar_row_offset[list];
  const int kv_head = index.shape.index_heads == 1 ? w.head[0] / p.group : 0;
  const BlockBounds bounds = bar_block_bounds(index, h, w.query_block[from]);
  const BlockBounds other = both ? bar_block_bounds(index, h, w.query_block[1]) : bounds;
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

template <int D>
__device__ void produce(ForwardShared<D>& sh, const ForwardMaps& maps, const ForwardParams& p) {
  Producer<D> out(sh, maps);
  int q_parity = 1;
  int item = atomicAdd(p.counter, 1);
  while (true) {
    if (item < p.items) sh.next_item = atomicAdd(p.counter, 1);  // its latency hides behind this item
    barrier_wait(&sh.q_empty, q_parity);
    q_parity ^= 1;
    if (item >= p.items) {
      sh.work.query_block[0] = -1;
      barrier_arrive(&sh.q_full);
      return;
    }
    sh.work = decode(p, item);
    const WorkItem& w = sh.work;
    for (int i = 0; i < 2; ++i) {
      // A query block past the end reads zeros and is never written.
      barrier_expect(&sh.q_full, ForwardShared<D>::kBlockBytes);
      for (int c = 0; c < ForwardShared<D>::kBoxes; ++c) {
        tma_load(sh.q[i] + c * kBlock * 128, &maps.q, &sh.q_full, c * 64, w.head[i], w.query_block[i] * kBlock);
      }
    }
    barrier_arrive(&sh.q_full);
    produce_blocks(out, p, w);
    if (p.index.has_bars()) {
      if (p.pairs_heads) {
        produce_bars(out, p, w, 0, true);
      } else {
        const bool second = w.query_block[1] < p.index.shape.q_blocks();
        const bool same = second && p.index.block_segment[w.query_block[0]] == p.index.block_segment[w.query_block[1]];
        produce_bars(out, p, w, 0, same);
        if (second && !same) produce_bars(out, p, w, 1, false);
      }
    }
    out.end();
    item = sh.next_item;
  }
}

// --- consumer -------------------------------------------------------------------------------------------------------
/// Sets masked scores of one 64-key half to -inf.  allowed0 / allowed1: columns of the thread's two rows.
template <int kHalf>
__device__ __forceinline__ void mask_half(float (&s)[64], std::uint64_t allowed0, std::uint64_t allowed1, int lane) {
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

template <int D>
struct Consumer {
  using Shared = ForwardShared<D>;
  static constexpr int kBoxes = Shared::kBoxes;
  Shared& sh;
  const ForwardParams& p;
  const int consumer, thread, lane, row;  // row: first of the thread's rows inside the 64-row block, the other is + 8
  RingPosition<Shared::kStages> ring;
  Interval seen0, seen1;  // visible keys of the two rows
  const Interval* bar_rows;

  __device__ Consumer(Shared& s, const ForwardParams& params, int which)
      : sh(s), p(params), consumer(uniform(which)), thread(threadIdx.x % 128), lane(threadIdx.x % 32),
        row(thread / 32 * 16 + lane / 4) {}

  /// Every warp arrives for itself: another warp of the warpgroup may still be reading.
  __device__ __forceinline__ void release(std::uint64_t* bar) {
    __syncwarp();
    if (lane == 0) barrier_arrive(bar);
  }
  /// Waits for the next stage that this consumer uses, giving back the others; -1 at the end of the item.  A consumer that
  /// still holds a stage passes over at most `skips` others, else the ring could run dry: one more counts as all masked.
  __device__ __forceinline__ int next_stage(int& parity, int& state, int skips) {
    while (true) {
      const int s = ring.stage;
      parity = ring.parity;
      barrier_wait(&sh.k_full[s], ring.parity);
      state = sh.tile[s].state[consumer];
      if (state == kEnd) return -1;
      ring.advance();
      if (state != kAllSkip || skips-- == 0) return s;
      barrier_wait(&sh.v_full[s], parity);  // or the stage could be refilled while its V is still arriving
      release(&sh.empty[s]);
    }
  }
  __device__ __forceinline__ std::uint64_t allowed(const TileInfo& t, int state, int half, Interval seen, int r) {
    if (state == kSkip) return 0;
    if (state == kWhole) return ~0ull;
    const std::uint64_t word = t.word[consumer][half];
    const std::uint64_t bits = interval_bits(seen.begin - t.key[half], seen.end - t.key[half]);
    if (t.bars) return bits & ~word;
    return (word >> r & 1) ? bits : 0;
  }
  __device__ __forceinline__ void mask(float (&s)[64], int stage, int state) {
    if (state == kAllWhole) return;
    const TileInfo& t = sh.tile[stage];
    Interval a = seen0, b = seen1;
    if (t.bars) {
      a = bar_rows[row];
      b = bar_rows[row + 8];
    }
    const int first = state & 0xFF, second = state >> 8;
    if (first != kWhole) mask_half<0>(s, allowed(t, first, 0, a, row), allowed(t, first, 0, b, row + 8), lane);
    if (second != kWhole) mask_half<1>(s, allowed(t, second, 1, a, row), allowed(t, second, 1, b, row + 8), lane);
  }

  __device__ __forceinline__ void issue_scores(float (&s)[64], int stage) {
    const std::uint32_t dq = descriptor(sh.q[consumer]), dk = descriptor(sh.k[uniform(stage)]);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kBoxes; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma<128>::template ss<0, 0>(s, advance(dq, c * kBlock * 128 + i * 32), advance(dk, c * Shared::kBoxStride + i * 32),
                                      c + i > 0);
      }
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_output(float (&o)[D / 2], const std::uint32_t (&probability)[32], int stage) {
    const std::uint32_t dv = descriptor(sh.v[uniform(stage)], Shared::kBoxStride);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) Wgmma<D>::template rs<1>(o, probability + 4 * i, advance(dv, i * 2048), 1);
    wgmma_commit();
  }
  /// Online softmax: s becomes P, the running maximum and sum are updated; returns the factors for the old output.
  __device__ __forceinline__ void softmax(float (&s)[64], float (&top)[2], float (&sum)[2], float (&factor)[2]) {
    // Two chains a row: a long chain of dependent operations would wait for itself.
    float m[4] = {top[0], top[1], -INFINITY, -INFINITY}, part[4] = {}, shift[2];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) m[e / 2 + 2 * (j % 2)] = fmaxf(m[e / 2 + 2 * (j % 2)], s[4 * j + e]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(m[r], m[r + 2]);
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      shift[r] = x == -INFINITY ? 0.0f : x * p.scale_log2;  // no key yet: every exponent stays -inf
      factor[r] = exp2_fast(top[r] * p.scale_log2 - shift[r]);
      top[r] = x;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s[4 * j + e];
        x = exp2_fast(x * p.scale_log2 - shift[e / 2]);
        part[e / 2 + 2 * (j % 2)] += x;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + (part[r] + part[r + 2]);
  }
  __device__ __forceinline__ void pack(const float (&s)[64], std::uint32_t (&probability)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) probability[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void store(float (&o)[D / 2], float (&top)[2], float (&sum)[2], int query_block, int head) {
    const std::int64_t tokens = p.index.shape.q_tokens;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = sum[r];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      const float inverse = l > 0 ? 1.0f / l : 0.0f;
      const std::int64_t token = static_cast<std::int64_t>(query_block) * kBlock + row + 8 * r;
      if (token >= tokens) continue;
      if (lane % 4 == 0) p.lse[head * tokens + token] = l > 0 ? top[r] * p.scale + logf(l) : -INFINITY;
      const std::int64_t base = token * p.o_stride + head * D + 2 * (lane % 4);
      if (p.o_fp32) {
        float* out = static_cast<float*>(p.o) + base;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          *reinterpret_cast<float2*>(out + 8 * j) =
              make_float2(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
        }
      } else {
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.o) + base;
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          *reinterpret_cast<std::uint32_t*>(out + 8 * j) =
              pack_bf16(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    float o[D / 2], s[64];
    std::uint32_t probability[32];
    int q_parity = 0;
    while (true) {
      barrier_wait(&sh.q_full, q_parity);
      q_parity ^= 1;
      const int query_block = sh.work.query_block[consumer];
      if (sh.work.query_block[0] < 0) return;
      const int head = sh.work.head[consumer];
      const bool exists = query_block < p.index.shape.q_blocks();
      if (exists) {
        const std::int64_t first = static_cast<std::int64_t>(query_block) * kBlock;
        seen0 = p.index.rows[first + row];
        seen1 = p.index.rows[first + row + 8];
        if (p.index.has_bars()) {
          bar_rows = p.index.bar_bounds + sh.work.index_head[consumer] * p.index.shape.q_blocks() * kBlock + first;
        }
      }
      float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0;

      int parity, state;
      int stage = next_stage(parity, state, INT_MAX);
      if (stage >= 0) {
        issue_scores(s, stage);
        wgmma_wait<0>();
        mask(s, stage, state);
        softmax(s, top, sum, factor);
        pack(s, probability);
        while (true) {
          int next_parity;
          const int next = next_stage(next_parity, state, Shared::kStages - 2);
          if (next < 0) break;
          issue_scores(s, next);
          barrier_wait(&sh.v_full[stage], parity);
          issue_output(o, probability, stage);
          wgmma_wait<1>();
          mask(s, next, state);
          softmax(s, top, sum, factor);
          wgmma_wait<0>();
          release(&sh.empty[stage]);
#pragma unroll
          for (int j = 0; j < D / 8; ++j) {
            o[4 * j] *= factor[0];
            o[4 * j + 1] *= factor[0];
            o[4 * j + 2] *= factor[1];
            o[4 * j + 3] *= factor[1];
          }
          pack(s, probability);
          stage = next;
          parity = next_parity;
        }
      }
      // ring now stands at the end marker; all score products of this item are complete.
      release(&sh.q_empty);
      if (stage >= 0) {
        barrier_wait(&sh.v_full[stage], parity);
        issue_output(o, probability, stage);
        wgmma_wait<0>();
        release(&sh.empty[stage]);
      }
      release(&sh.empty[ring.stage]);
      ring.advance();
      if (exists) store(o, top, sum, query_block, head);
    }
  }
};

template <int D>
__global__ __launch_bounds__(kThreads, 1) void attention_forward_kernel(const __grid_constant__ ForwardMaps maps,
                                                                        const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sh = *reinterpret_cast<ForwardShared<D>*>(raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < ForwardShared<D>::kStages; ++s) {
      barrier_init(&sh.k_full[s], 1);
      barrier_init(&sh.v_full[s], 1);
      barrier_init(&sh.empty[s], kConsumerWarps);
    }
    barrier_init(&sh.q_full, 1);
    barrier_init(&sh.q_empty, kConsumerWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_release<56>();
    if (threadIdx.x == 0) produce<D>(sh, maps, p);
  } else {
    registers_claim<224>();
    Consumer<D>(sh, p, threadIdx.x / 128 - 1).run();
  }
}

template <int D>
cudaError_t launch(const ForwardMaps& maps, const ForwardParams& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  constexpr int kBytes = sizeof(ForwardShared<D>);
  static_assert(kBytes <= 232448 && offsetof(ForwardShared<D>, q) == 0);
  if (e == cudaSuccess) {
    e = cudaFuncSetAttribute(attention_forward_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (e != cudaSuccess) return e;
  attention_forward_kernel<D><<<min(processors, p.items), kThreads, kBytes, stream>>>(maps, p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t hopper::make_tensor_map(CUtensorMap* map, const void* base, bool fp32, int head_dim, int heads,
                                    std::int64_t tokens, std::int64_t stride) {
  // The driver's encoder, found at run time so that nothing links against libcuda.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      function = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const std::uint64_t bytes = fp32 ? 4 : 2;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {head_dim * bytes, static_cast<cuuint64_t>(stride) * bytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / bytes), 1, kBlock};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult r = encode(map, fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
                            const_cast<void*>(base), size, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t forward_sm90(const AttentionForwardArgs& a, const AttentionScratch& scratch, cudaStream_t stream) {
  const DeviceIndex& index = *a.index;
  ForwardParams p;
  p.index = index;
  p.group = a.q_heads / a.kv_heads;
  p.pairs_heads = index.pairs_heads();
  p.inner = p.pairs_heads ? a.q_heads / 2 : index.shape.index_heads == 1 ? a.q_heads : 1;
  p.turn = index.key_heads_in_turn() && p.inner % a.kv_heads == 0 ? p.inner / a.kv_heads : p.inner;
  p.items = static_cast<int>(index.forward_units()) * p.inner;
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.o = a.o;
  p.o_stride = a.o_stride;
  p.o_fp32 = a.o_fp32;
  p.lse = a.lse;
  p.counter = scratch.counters;

  ForwardMaps maps;
  using hopper::make_tensor_map;
  cudaError_t e = make_tensor_map(&maps.q, a.q, false, a.head_dim, a.q_heads, index.shape.q_tokens, a.q_stride);
  if (e == cudaSuccess) e = make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, index.shape.k_tokens, a.k_stride);
  if (e == cudaSuccess) e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, index.shape.k_tokens, a.v_stride);
  maps.bar_k = maps.k;
  maps.bar_v = maps.v;
  if (e == cudaSuccess && index.has_bars()) {
    const int heads = index.bar_heads();
    e = make_tensor_map(&maps.bar_k, scratch.bar_k, false, a.head_dim, heads, index.bar_rows(), heads * a.head_dim);
    if (e == cudaSuccess) {
      e = make_tensor_map(&maps.bar_v, scratch.bar_v, false, a.head_dim, heads, index.bar_rows(), heads * a.head_dim);
    }
  }
  if (e != cudaSuccess) return e;
  return a.head_dim == 128 ? launch<128>(maps, p, stream) : launch<64>(maps, p, stream);
}

}  // namespace ballast::cuda
