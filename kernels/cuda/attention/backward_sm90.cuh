// Attention backward on Hopper for head dims up to 128: key-stationary, wgmma and TMA, persistent
// grid.
//
// Each of the two consumer warpgroups owns 64 of a unit's 128 keys and keeps their dK and dV in
// registers while (query head, query block) tiles of Q and dO stream by.  Scores are computed
// transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T feed dV += P^T dO and dK += dS^T
// Q straight from registers.  dS goes to shared memory once, for dQ += dS K, which leaves as an
// fp32 bulk reduce-add: 64 columns per consumer.  At head dim 64 a tile has two blocks of 64
// queries from anywhere, so that products are as wide and barriers as rare as at 128, and each
// consumer sends the dQ of one (tiles of gathered rows have one block, and 32 columns per
// consumer).
// (FlashAttention-2, Dao 2023, Algorithm 2; the transposed form is FlashAttention-3's.)
#pragma once
#include "kernels/cuda/attention/backward_turns.cuh"

namespace ballast::cuda {

template <int D, QueryGradient kDq>
struct BackwardConsumer {
  using Shared = BackwardShared<D, kDq == QueryGradient::rows>;
  static constexpr int kBoxes = Shared::kBoxes, kTileBlocks = Shared::kTileBlocks;
  static constexpr bool kWithDq = kDq != QueryGradient::apart, kSent = sends_jobs(kDq);
  static_assert(kQueryStages == 2, "dS and the previous tile are named by the parity of the stage");
  Shared& sh;
  const BackwardMaps& maps;
  const BackwardParams& p;
  const int consumer, thread, lane, row;
  RingPosition<kQueryStages> ring;
  int previous;  // head and query block of the previous tile, whose stage is the other one: of its
                 // only block, or of this consumer's (kNoBlock: it has none); kNone at the start of
                 // a unit
  int jobs = 0;  // before the next one
  static constexpr int kNone = -1, kNoBlock = -2;
  static constexpr int kDqRegisters = kWithDq ? Shared::kSliceColumns / 2 : 1;
  static constexpr int kScores = 32 * kTileBlocks;  // a thread's registers of S^T, dP^T
  static constexpr bool kEarly = D <= 64;           // dP beside dQ: above, registers do not suffice

  __device__ BackwardConsumer(Shared& s, const BackwardMaps& m, const BackwardParams& params,
                              int which)
      : sh(s),
        maps(m),
        p(params),
        consumer(uniform(which)),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        row(thread / 32 * 16 + lane / 4) {}

  /// keys x queries product of the consumer's 64 keys: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_transposed(float (&acc)[kScores], const unsigned char* keys,
                                                   const unsigned char* queries) {
    const std::uint32_t a = descriptor(keys + consumer * kBlock * 128), b = descriptor(queries);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int c = i / 4;
      Wgmma<kTileBlocks * kBlock>::template ss<0, 0>(
          acc, advance(a, c * Shared::kKeyBoxStride + i % 4 * 32),
          advance(b, c * kBlock * 128 + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  }
  /// dV += P^T dO or dK += dS^T Q.
  __device__ __forceinline__ void issue_gradient(float (&acc)[D / 2],
                                                 const std::uint32_t (&a)[kScores / 2],
                                                 const unsigned char* queries) {
    const std::uint32_t b = descriptor(queries, kBlock * 128);
#pragma unroll
    for (int i = 0; i < 4 * kTileBlocks; ++i)
      Wgmma<D>::template rs<1>(acc, a + 4 * i, advance(b, i * 2048), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ std::uint64_t allowed(const QueryTile& t, int r) {
    if (kTileBlocks > 1 && t.state[consumer] == kSkip) return 0;
    return allowed_queries(t, sh.key_queries[consumer * kBlock + r], t.word[consumer],
                           sh.unit.columns, r) >>
           (2 * (lane % 4));
  }
  /// P^T from S^T: probabilities under the final LSE, zero where masked.
  __device__ __forceinline__ void probabilities(float (&s)[kScores], int stage) {
#pragma unroll
    for (int b = 0; b < kTileBlocks; ++b) {
      const float* lse2 = sh.statistics[stage][b][0] + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * j);
        float* x = s + 32 * b + 4 * j;
        x[0] = exp2_fast(x[0] * p.scale_log2 - l.x);
        x[1] = exp2_fast(x[1] * p.scale_log2 - l.y);
        x[2] = exp2_fast(x[2] * p.scale_log2 - l.x);
        x[3] = exp2_fast(x[3] * p.scale_log2 - l.y);
      }
      const QueryTile& t = sh.tile[stage][b];
      if (t.state[consumer] == kWhole) continue;
      const std::uint64_t allowed0 = allowed(t, row), allowed1 = allowed(t, row + 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!(allowed0 >> (8 * j + e) & 1)) s[32 * b + 4 * j + e] = 0;
          if (!(allowed1 >> (8 * j + e) & 1)) s[32 * b + 4 * j + 2 + e] = 0;
        }
      }
    }
  }
  /// dS^T = P^T * (dP^T - delta), as bf16 A operand.  P is the rounded one that dV uses: its fp32
  /// form would not fit in the registers beside dK and dV.
  __device__ __forceinline__ void score_gradients(const std::uint32_t (&probability)[kScores / 2],
                                                  const float (&dp)[kScores],
                                                  std::uint32_t (&ds)[kScores / 2], int stage) {
#pragma unroll
    for (int j = 0; j < 8 * kTileBlocks; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(sh.statistics[stage][j / 8][1] +
                                                        2 * (lane % 4) + j % 8 * 8);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t pair = probability[2 * j + r];
        ds[2 * j + r] =
            pack_bf16(__uint_as_float(pair << 16) * (dp[4 * j + 2 * r] - d.x),
                      __uint_as_float(pair & 0xFFFF0000u) * (dp[4 * j + 2 * r + 1] - d.y));
      }
    }
  }
  /// dS^T into shared memory, rows of 64 queries, 128-byte swizzle.
  __device__ __forceinline__ void share(const std::uint32_t (&ds)[kScores / 2]) {
    const int key = thread / 32 * 16 +
                    lane % 16;  // row that this lane addresses: matrices 0, 1 are rows 0-7, 8-15
    const std::uint32_t base = smem_address(sh.ds[ring.stage]) + (consumer * kBlock + key) * 128;
#pragma unroll
    for (int i = 0; i < 4 * kTileBlocks; ++i) {
      const int column = 2 * (i % 4) + lane / 16;  // matrices 2, 3: the next 8 queries
      store_matrix_x4(base + i / 4 * Shared::kUnitKeys * 128 + ((column ^ (key & 7)) << 4),
                      ds + 4 * i);
    }
    fence_async_proxy();
  }
  /// dS for both consumers.  The named barriers 4 to 7 are one per consumer and buffer: this
  /// consumer arrives, the other waits.
  __device__ __forceinline__ void publish(const std::uint32_t (&ds)[kScores / 2]) {
    share(ds);
    named_arrive(4 + 2 * ring.stage + consumer, 256);
    named_barrier(8 + consumer, 128);
  }
  __device__ __forceinline__ void issue_query_gradient(float (&dq)[kDqRegisters]) {
    const int previous_stage = uniform(ring.stage) ^ 1;
    // The consumer's block of queries and all columns of K, or its columns: the second 128-byte box
    // (whose columns past D are zeros), or the second half of the only box.
    const int block = kTileBlocks > 1 ? consumer * Shared::kUnitKeys * 128 : 0,
              columns = kTileBlocks > 1 ? 0
                        : kBoxes == 2   ? consumer * Shared::kKeyBoxStride
                                        : consumer * 64;
    const std::uint32_t a = descriptor(sh.ds[previous_stage] + block);
    const std::uint32_t b = descriptor(sh.k + columns);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Wgmma<Shared::kSliceColumns>::template ss<1, 1>(dq, advance(a, i * 2048),
                                                      advance(b, i * 2048), i > 0);
    }
    wgmma_commit();
  }
  /// Sends the consumer's columns of dQ to L2, where they are added (or stored): through the
  /// senders where those decide (sends_jobs()), else at once.
  __device__ __forceinline__ void reduce(const float (&dq)[kDqRegisters], int query_block,
                                         int head) {
    if constexpr (kSent) {
      const JobSide<D, kDq> side{sh, consumer, thread};
      side.wait(jobs);
      stage_query_gradient<Shared::kSliceColumns>(dq, sh.dq[consumer], row, lane, p.scale);
      side.give(jobs++, {head, query_block, kTileBlocks > 1 ? 0 : consumer, sh.unit.turn});
    } else if constexpr (kDq == QueryGradient::rows) {
      reduce_rows(dq, query_block);
    } else {
      unsigned char* out = sh.dq[consumer];
      if (thread == 0) bulk_wait_read();
      named_barrier(2 + consumer, 128);
      stage_query_gradient<Shared::kSliceColumns>(dq, out, row, lane, p.scale);
      named_barrier(2 + consumer, 128);
      if (thread == 0) {
        for (int b = 0; b < Shared::kSliceColumns / 32; ++b) {
          const int column = (kTileBlocks > 1 ? 0 : consumer * Shared::kSliceColumns) + b * 32;
          if (column < D)
            tma_reduce_add(&maps.dq, out + b * kBlock * 128, column, head, query_block * kBlock);
        }
        bulk_commit();
      }
    }
  }

  /// The same of gathered rows, whose entries lie in sh.rows[at], from registers: neighbouring
  /// lanes exchange halves, so that each adds four columns of one row.  (A row a copy of the copy
  /// engine is no faster, at head dim 64 a sixth slower.)
  __device__ __forceinline__ void reduce_rows(const float (&dq)[kDqRegisters], int at) {
    const bool odd = lane & 1;
    const std::uint32_t entry = sh.rows[at][row + (odd ? 8 : 0)];
    float* out = p.dq + static_cast<std::int64_t>(entry >> 4) * p.dq_stride +
                 (sh.unit.kv_head * p.group + (entry & 15)) * D + consumer * Shared::kSliceColumns +
                 4 * (lane % 4 / 2);
#pragma unroll
    for (int j = 0; j < Shared::kSliceColumns / 8; ++j) {
      float mine[2], theirs[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        mine[e] = p.scale * (odd ? dq[4 * j + 2 + e] : dq[4 * j + e]);
        theirs[e] = __shfl_xor_sync(~0u, p.scale * (odd ? dq[4 * j + e] : dq[4 * j + 2 + e]), 1);
      }
      if (entry == kNoRow) continue;
      if (odd) {
        global_add(out + 8 * j, theirs[0], theirs[1], mine[0], mine[1]);
      } else {
        global_add(out + 8 * j, mine[0], mine[1], theirs[0], theirs[1]);
      }
    }
  }

  /// Starts dQ of the previous tile, once both consumers have written its dS.
  __device__ __forceinline__ void begin_query_gradient(float (&dq)[kDqRegisters]) {
    if constexpr (kWithDq) {
      named_barrier(4 + 2 * (ring.stage ^ 1) + (consumer ^ 1),
                    256);  // the other consumer's publish() arrives
      issue_query_gradient(dq);
    }
  }
  __device__ __forceinline__ void finish_query_gradient(const float (&dq)[kDqRegisters]) {
    if constexpr (kWithDq) {
      if (previous >= 0) reduce(dq, previous & ((1 << kBlockBits) - 1), previous >> kBlockBits);
    }
  }
  /// The previous tile's dK, the last reader of its stage, is complete.
  __device__ __forceinline__ void release_previous() {
    if (previous != kNone) warp_arrive(&sh.empty[ring.stage ^ 1]);
  }

  __device__ __forceinline__ void store(const float (&dk)[D / 2], const float (&dv)[D / 2],
                                        const WorkUnit& u) {
    const std::int64_t token = u.first_row + consumer * kBlock + row;
    const std::int64_t left = (u.columns ? LLONG_MAX : p.index.shape.k_tokens) - token;
    const std::int64_t column_stride = p.index.column_heads() * D, column = u.kv_head * D;
    const std::int64_t dk_stride = u.columns ? column_stride : p.dk_stride,
                       dv_stride = u.columns ? column_stride : p.dv_stride;
    constexpr bool kTurns = kDq == QueryGradient::turns;
    // Parts in turns find what the first one wrote; else zeros.
    const bool add = (p.add && !u.columns) || (kTurns ? u.part > 0 : u.parts > 1);
    if constexpr (kTurns) await_part(p, u, consumer, thread);
    store_key_gradient(dk, (u.columns ? p.column_dk : p.dk) + token * dk_stride + column, dk_stride,
                       p.scale, left, add);
    store_key_gradient(dv, (u.columns ? p.column_dv : p.dv) + token * dv_stride + column, dv_stride,
                       1.0f, left, add);
    if constexpr (kTurns) pass_part(p, u, consumer, thread);
  }

  /// One tile: its P, dV and dS; dQ of the tile before; dK stays in flight.
  __device__ __forceinline__ void tile(float (&dk)[D / 2], float (&dv)[D / 2], int stage) {
    float s[kScores], dq[kDqRegisters];
    std::uint32_t a[kScores / 2];
    wgmma_fence();
    issue_transposed(s, sh.k, sh.q[stage]);
    wgmma_wait<1>();  // dK of the previous tile
    release_previous();
    wgmma_wait<0>();
    probabilities(s, stage);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) a[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    barrier_wait(&sh.dout_full[stage], ring.parity);
    wgmma_fence();
    begin_query_gradient(dq);
    float dp[kScores];
    if constexpr (kEarly) issue_transposed(dp, sh.v, sh.dout[stage]);
    issue_gradient(dv, a, sh.dout[stage]);
    wgmma_wait<kEarly ? 2 : 1>();
    finish_query_gradient(dq);
    if constexpr (!kEarly) {
      wgmma_fence();
      issue_transposed(dp, sh.v, sh.dout[stage]);
    }
    wgmma_wait<0>();
    std::uint32_t ds[kScores / 2];
    score_gradients(a, dp, ds, stage);
    if (kWithDq) publish(ds);
    wgmma_fence();
    issue_gradient(dk, ds, sh.q[stage]);
  }
  __device__ __forceinline__ void finish_previous() {
    float dq[kDqRegisters];
    wgmma_fence();
    begin_query_gradient(dq);
    wgmma_wait<0>();
    release_previous();
    finish_query_gradient(dq);
  }

  /// dK of tile i - 1 is in flight when tile i begins, and dQ of tile i - 1 starts only after P of
  /// tile i: so the two consumers may run half a tile apart, one computing exponentials while the
  /// other feeds the tensor cores.  (A barrier right after dS keeps them in step, and both then
  /// wait at the same time: 10 % slower.)  The first tile of a unit computes a dQ that nobody
  /// wants.
  __device__ __forceinline__ void unit(float (&dk)[D / 2], float (&dv)[D / 2]) {
    previous = kNone;
    if (kWithDq) named_arrive(4 + 2 * (ring.stage ^ 1) + consumer, 256);
    while (true) {
      const int stage = uniform(ring.stage);
      barrier_wait(&sh.q_full[stage], ring.parity);
      const QueryTile(&t)[kTileBlocks] = sh.tile[stage];
      if (t[0].end) break;
      bool seen = false;
      for (int b = 0; b < kTileBlocks; ++b) seen |= t[b].state[consumer] != kSkip;
      // __shfl_sync tells the compiler that the branch is uniform, as wgmma demands.
      if (__shfl_sync(~0u, seen, 0)) {
        tile(dk, dv, stage);
      } else {
        finish_previous();
        barrier_wait(&sh.dout_full[stage], ring.parity);
        const std::uint32_t zero[kScores / 2] = {};
        if (kWithDq) publish(zero);
      }
      const QueryTile& own = t[kTileBlocks > 1 ? consumer : 0];
      previous = own.head < 0 ? kNoBlock : own.head << kBlockBits | own.query_block;
      ring.advance();
    }
    finish_previous();
  }

  __device__ __forceinline__ void run() {
    int kv_parity = 0;
    while (true) {
      barrier_wait(&sh.kv_full, kv_parity);
      kv_parity ^= 1;
      if (sh.unit.done) break;
      float dk[D / 2], dv[D / 2];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
      unit(dk, dv);
      const WorkUnit u = sh.unit;
      warp_arrive(&sh.kv_empty);
      warp_arrive(&sh.empty[ring.stage]);
      ring.advance();
      store(dk, dv, u);
    }
    if constexpr (kSent) {
      JobSide<D, kDq>{sh, consumer, thread}.end(jobs);
    } else if (kDq == QueryGradient::adds && thread == 0) {
      bulk_wait();
    }
  }
};

template <int D, QueryGradient kDq>
__global__ __launch_bounds__(kBackwardThreads, 1) void attention_backward_kernel(
    const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  backward_roles<D, kDq, BackwardConsumer<D, kDq>>(raw, maps, p);
}

template <int D>
cudaError_t launch_backward(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                            cudaStream_t stream) {
  using Shared = BackwardShared<D>;
  switch (dq) {
    case QueryGradient::apart:
      return launch_backward<Shared>(attention_backward_kernel<D, QueryGradient::apart>, maps, p,
                                     stream);
    case QueryGradient::adds:
      return launch_backward<Shared>(attention_backward_kernel<D, QueryGradient::adds>, maps, p,
                                     stream);
    case QueryGradient::turns:
      return launch_backward<Shared>(attention_backward_kernel<D, QueryGradient::turns>, maps, p,
                                     stream);
    case QueryGradient::firsts:
      if constexpr (has_firsts(D)) {
        return launch_backward<Shared>(attention_backward_kernel<D, QueryGradient::firsts>, maps, p,
                                       stream);
      }
      break;
    case QueryGradient::rows:
      break;  // routed_backward_sm90()
  }
  return cudaErrorInvalidValue;
}

}  // namespace ballast::cuda
