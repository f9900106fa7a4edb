// Attention forward on Hopper: wgmma, TMA and a persistent grid.
//
// A CTA has one producer warp and two consumer warpgroups; each consumer owns 64 query rows.  Where
// query heads share a key head and a list, the two consumers take two heads of one query block, so
// any list is used without waste; otherwise they take two neighbouring query blocks of one head and
// walk the union of their lists.  At head dim 64, whose tiles are small, dense
// attention has three consumers.
// A stage of the ring holds the K and V of two 64-key blocks *from anywhere* (of one at head dim
// 256): block lists, gathered columns and dense attention run the same inner loop.  Inside a
// consumer the score product of stage j + 1 is issued before P V of stage j, so the softmax of one
// stage runs while the tensor cores work on the other (FlashAttention-3, Shah et al. 2024,
// Section 3.2).
#pragma once
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/query_tiles.cuh"

namespace ballast::cuda {

struct ForwardParams {
  QueryWork work;
  float scale, scale_log2;
  void* o;
  std::int64_t o_stride;
  bool o_fp32;
  bool o_vectors;  // rows of a bf16 o begin at multiples of 16 bytes
  float* lse;
};

struct ForwardMaps {
  CUtensorMap q;
  KeyMaps keys;
};

/// As many stages as shared memory has room for.
constexpr int forward_stages(int d) { return d > 128 ? 2 : d > 64 ? 3 : 5; }
template <int D, int kConsumers>
using ForwardRing = KeyRing<D, forward_stages(D), kConsumers, tile_halves(D), tile_halves(D) == 1>;

template <int D, int kConsumers>
struct ForwardShared : ForwardRing<D, kConsumers> {
  alignas(1024) unsigned char q[kConsumers][ForwardRing<D, kConsumers>::kBlockBytes];
};

template <int D, int kConsumers>
struct ForwardConsumer {
  using Shared = ForwardShared<D, kConsumers>;
  static constexpr int kKeys = Shared::kHalves * kBlock;  // of a tile
  static constexpr int kTurn = 1;                         // named barriers of begin_turn()
  Shared& sh;
  const ForwardParams& p;
  const int consumer, thread, lane,
      row;  // row: first of the thread's rows inside the 64-row block, the other is + 8
  RingPosition<Shared::kStages> ring;
  Interval seen0, seen1;  // visible keys of the two rows
  int count = 0;          // work items before this one

  __device__ ForwardConsumer(Shared& s, const ForwardParams& params, int which)
      : sh(s),
        p(params),
        consumer(uniform(which)),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        row(thread / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ const WorkItem<kConsumers>& work() const {
    return sh.work[count % Shared::kWorkSlots];
  }

  /// Waits for the next stage that this consumer uses, giving back the others; -1 at the end of the
  /// item.  A consumer that still holds a stage passes over at most `skips` others, else the ring
  /// could run dry: one more counts as all masked.
  __device__ __forceinline__ int next_stage(int& parity, int& state, int skips) {
    while (true) {
      const int s = ring.stage;
      parity = ring.parity;
      barrier_wait(&sh.k_full[s], ring.parity);
      state = sh.tile[s].state[consumer];
      if (state == kEnd) return -1;
      ring.advance();
      if (state != kAllSkip || skips-- == 0) return s;
      barrier_wait(&sh.v_full[s],
                   parity);  // or the stage could be refilled while its V is still arriving
      sh.release_keys(s);
      sh.release(s);
      begin_turn();
      end_turn();
    }
  }
  /// Three consumers issue their products in turn, one turn a stage of the ring: else all of them
  /// compute exponentials at the same time, and leave the tensor cores idle at the same time.
  __device__ __forceinline__ void begin_turn() {
    if constexpr (kConsumers == 3) named_barrier(kTurn + consumer, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (kConsumers == 3)
      named_arrive(kTurn + (consumer == kConsumers - 1 ? 0 : consumer + 1), 256);
  }
  __device__ __forceinline__ void mask(float (&s)[kKeys / 2], int stage, int state) {
    if (state == kAllWhole) return;
    const auto& t = sh.tile[stage];
    const DeviceIndex& index = p.work.index;
    Interval a = seen0, b = seen1;
    if constexpr (kConsumers == 3) {  // which have no registers for them
      const int last = static_cast<int>(index.shape.q_blocks()) - 1;
      const Interval* rows = index.rows + min(work().query_block[consumer], last) * kBlock;
      a = rows[row];
      b = rows[row + 8];
    }
    if (t.columns) {
      const Interval* rows =
          index.column_bounds +
          (work().index_head[consumer] * index.shape.q_blocks() + work().query_block[consumer]) *
              kBlock;
      a = rows[row];
      b = rows[row + 8];
    }
    const int first = state & 0xFF, second = state >> 8;
    if (first != kWhole) {
      mask_half<0>(s, allowed_columns(t, consumer, first, 0, a, row),
                   allowed_columns(t, consumer, first, 0, b, row + 8), lane);
    }
    if (Shared::kHalves == 2 && second != kWhole) {
      mask_half<Shared::kHalves - 1>(s, allowed_columns(t, consumer, second, 1, a, row),
                                     allowed_columns(t, consumer, second, 1, b, row + 8), lane);
    }
  }

  __device__ __forceinline__ void issue_scores(float (&s)[kKeys / 2], int stage) {
    const std::uint32_t dq = descriptor(sh.q[consumer]), dk = descriptor(sh.k[uniform(stage)]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int c = i / 4;
      Wgmma<kKeys>::template ss<0, 0>(s, advance(dq, c * kBlock * 128 + i % 4 * 32),
                                      advance(dk, c * Shared::kBoxStride + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_output(float (&o)[D / 2],
                                               const std::uint32_t (&probability)[kKeys / 4],
                                               int stage) {
    const std::uint32_t dv = descriptor(sh.v[uniform(stage)], Shared::kBoxStride);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      Wgmma<D>::template rs<1>(o, probability + 4 * i, advance(dv, i * 2048), 1);
    wgmma_commit();
  }
  /// Online softmax: s becomes P, the running maximum and sum are updated; returns the factors for
  /// the old output.
  __device__ __forceinline__ void softmax(float (&s)[kKeys / 2], float (&top)[2], float (&sum)[2],
                                          float (&factor)[2]) {
    // Two chains a row: a long chain of dependent operations would wait for itself.
    float m[4] = {top[0], top[1], -INFINITY, -INFINITY}, part[4] = {}, shift[2];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        m[e / 2 + 2 * (j % 2)] = fmaxf(m[e / 2 + 2 * (j % 2)], s[4 * j + e]);
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
    for (int j = 0; j < kKeys / 8; ++j) {
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
  __device__ __forceinline__ void pack(const float (&s)[kKeys / 2],
                                       std::uint32_t (&probability)[kKeys / 4]) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) probability[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void store(float (&o)[D / 2], float (&top)[2], float (&sum)[2],
                                        int query_block, int head) {
    const std::int64_t tokens = p.work.index.shape.q_tokens;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = sum[r];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      const float inverse = l > 0 ? 1.0f / l : 0.0f;
      const std::int64_t token = static_cast<std::int64_t>(query_block) * kBlock + row + 8 * r;
      const bool stored = token < tokens;  // the same in the four lanes of a row
      if (stored && lane % 4 == 0)
        p.lse[head * tokens + token] = l > 0 ? top[r] * p.scale + logf(l) : -INFINITY;
      const std::int64_t base = token * p.o_stride + head * D + 2 * (lane % 4);
      if (p.o_fp32) {
        float* out = static_cast<float*>(p.o) + base;
#pragma unroll
        for (int j = 0; j < D / 8 && stored; ++j) {
          *reinterpret_cast<float2*>(out + 8 * j) =
              make_float2(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
        }
      } else if (p.o_vectors) {
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.o) + base + 6 * (lane % 4);
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
          std::uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            w[i] =
                pack_bf16(o[4 * (j + i) + 2 * r] * inverse, o[4 * (j + i) + 2 * r + 1] * inverse);
          transpose_quad(w, lane);
          if (stored) *reinterpret_cast<uint4*>(out + 8 * j) = make_uint4(w[0], w[1], w[2], w[3]);
        }
      } else {
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.o) + base;
#pragma unroll
        for (int j = 0; j < D / 8 && stored; ++j) {
          *reinterpret_cast<std::uint32_t*>(out + 8 * j) =
              pack_bf16(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
        }
      }
    }
  }

  /// The tiles of one item; o, top and sum begin as those of no key.  Queries and the ring's stages
  /// are given back.
  __device__ __forceinline__ void item(float (&o)[D / 2], float (&top)[2], float (&sum)[2]) {
    float s[kKeys / 2], factor[2];
    std::uint32_t probability[kKeys / 4];
    int parity, state;
    int stage = next_stage(parity, state, INT_MAX);
    if (stage >= 0) {
      begin_turn();
      issue_scores(s, stage);
      end_turn();
      wgmma_wait<0>();
      mask(s, stage, state);
      sh.release_keys(stage);
      softmax(s, top, sum, factor);
      pack(s, probability);
      while (true) {
        int next_parity;
        const int next = next_stage(next_parity, state, Shared::kStages - 2);
        if (next < 0) break;
        begin_turn();
        issue_scores(s, next);
        barrier_wait(&sh.v_full[stage], parity);
        issue_output(o, probability, stage);
        end_turn();
        wgmma_wait<1>();
        mask(s, next, state);
        sh.release_keys(next);
        softmax(s, top, sum, factor);
        wgmma_wait<0>();
        sh.release(stage);
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
    warp_arrive(&sh.q_empty);
    if (stage >= 0) {
      barrier_wait(&sh.v_full[stage], parity);
      issue_output(o, probability, stage);
      wgmma_wait<0>();
      sh.release(stage);
    }
    sh.release_keys(ring.stage);
    sh.release(ring.stage);
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    const DeviceIndex& index = p.work.index;
    if (consumer == kConsumers - 1) end_turn();  // the first one's first turn
    for (;; ++count) {
      barrier_wait(&sh.q_full, count % 2);
      const int query_block = work().query_block[consumer];
      if (work().query_block[0] < 0) return;
      const int head = work().head[consumer];
      const bool exists = query_block < index.shape.q_blocks();
      if (exists && kConsumers < 3) {
        const std::int64_t first = static_cast<std::int64_t>(query_block) * kBlock;
        seen0 = index.rows[first + row];
        seen1 = index.rows[first + row + 8];
      }
      float o[D / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] = 0;
      item(o, top, sum);
      if (exists) store(o, top, sum, query_block, head);
    }
  }
};

template <int D, int kConsumers>
__global__ __launch_bounds__(
    ForwardShared<D, kConsumers>::kThreads,
    1) void attention_forward_kernel(const __grid_constant__ ForwardMaps maps,
                                     const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  using Shared = ForwardShared<D, kConsumers>;
  auto& sh = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) sh.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_release<kConsumers == 3 ? 32 : 56>();
    if (threadIdx.x == 0) produce(sh, maps.keys, p.work);
    if (threadIdx.x == 32) {
      fetch_queries(sh, [&](const WorkItem<kConsumers>& w) {
#pragma unroll 1
        for (int i = 0; i < kConsumers; ++i) {
          barrier_expect(&sh.q_full, Shared::kBlockBytes);
          for (int c = 0; c < Shared::kBoxes; ++c) {
            tma_load(sh.q[i] + c * kBlock * 128, &maps.q, &sh.q_full, c * 64, w.head[i],
                     w.query_block[i] * kBlock);
          }
        }
      });
    }
  } else {
    registers_claim<kConsumers == 3 ? 160 : 224>();
    ForwardConsumer<D, kConsumers>(sh, p, threadIdx.x / 128 - 1).run();
  }
}

/// Host: the kernel of one head dim (forward_d*_sm90.cu).
template <int D, int kConsumers>
cudaError_t launch_forward(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                           cudaStream_t stream) {
  using Shared = ForwardShared<D, kConsumers>;
  ForwardParams p;
  p.work = query_work(*a.index, D, kConsumers, scratch.counters);
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.o = a.o;
  p.o_stride = a.o_stride;
  p.o_fp32 = a.o_fp32;
  p.o_vectors = a.o_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(a.o) % 16 == 0;
  p.lse = a.lse;
  ForwardMaps maps;
  cudaError_t e = make_tensor_map(&maps.q, a.q, false, a.head_dim, a.q_heads,
                                  a.index->shape.q_tokens, a.q_stride);
  if (e == cudaSuccess) e = make_key_maps<Shared>(maps.keys, a, scratch);
  if (e != cudaSuccess) return e;
  return launch_persistent<Shared>(attention_forward_kernel<D, kConsumers>, p.work.items, stream,
                                   maps, p);
}

}  // namespace ballast::cuda
