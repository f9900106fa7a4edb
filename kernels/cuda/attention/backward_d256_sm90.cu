// Attention backward on Hopper at head dim 256: key-stationary like backward_sm90.cuh, but a unit
// is 64 keys, and the two consumer warpgroups share them.
//
// dK and dV of 64 keys and 256 columns need all the registers of two warpgroups, so each consumer
// keeps 128 columns of both.  Of S^T = K Q^T and dP^T = V dO^T each computes 32 of the 64 queries;
// P^T and dS^T meet in shared memory, from where they feed dV += P^T dO, dK += dS^T Q and
// dQ += dS K, of which either consumer again computes its 128 columns, 64 at a time.
#include "kernels/cuda/attention/backward_turns.cuh"

namespace ballast::cuda {
namespace {

template <QueryGradient kDq>
struct WideConsumer {
  static constexpr int D = 256, kColumns = D / 2, kQueries = kBlock / 2;
  using Shared = BackwardShared<D>;
  static constexpr bool kWithDq = kDq != QueryGradient::apart;
  static constexpr int kJoin = 4, kMeet = 5;  // named barriers of both consumers: P^T; dS^T
  static_assert(kQueryStages == 2, "P^T and dS^T are named by the parity of the stage");
  Shared& sh;
  const BackwardMaps& maps;
  const BackwardParams& p;
  const int consumer, thread, lane, row;
  RingPosition<kQueryStages> ring;
  int dout_parity = 0;
  int previous;  // head and query block of the previous tile; kNone at the start of a unit
  int jobs = 0;  // before the next one
  static constexpr int kNone = -1;

  __device__ WideConsumer(Shared& s, const BackwardMaps& m, const BackwardParams& params, int which)
      : sh(s),
        maps(m),
        p(params),
        consumer(uniform(which)),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        row(thread / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ unsigned char* probability(int stage) { return sh.ds[2 + stage]; }
  /// The consumer's 128 columns of a 64-row operand.
  __device__ __forceinline__ std::uint32_t own_columns(const unsigned char* rows) {
    return descriptor(rows + consumer * 2 * kBlock * 128, kBlock * 128);
  }

  /// 64 keys x the consumer's 32 queries: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_transposed(float (&acc)[16], const unsigned char* keys,
                                                   const unsigned char* queries) {
    const std::uint32_t a = descriptor(keys), b = descriptor(queries + consumer * kQueries * 128);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int at = i / 4 * kBlock * 128 + i % 4 * 32;
      Wgmma<32>::template ss<0, 0>(acc, advance(a, at), advance(b, at), i > 0);
    }
    wgmma_commit();
  }
  /// dV += P^T dO or dK += dS^T Q, the consumer's columns.
  __device__ __forceinline__ void issue_gradient(float (&acc)[kColumns / 2],
                                                 const unsigned char* scores,
                                                 const unsigned char* queries) {
    const std::uint32_t a = descriptor(scores), b = own_columns(queries);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Wgmma<kColumns>::template ss<0, 1>(acc, advance(a, i * 32), advance(b, i * 2048), 1);
    wgmma_commit();
  }
  /// dQ = dS K of the previous tile, 64 of the consumer's columns.
  __device__ __forceinline__ void issue_query_gradient(float (&dq)[32], int half) {
    if constexpr (kWithDq) {
      const std::uint32_t a = descriptor(sh.ds[uniform(ring.stage) ^ 1]),
                          b = descriptor(sh.k + (2 * consumer + half) * kBlock * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<64>::template ss<1, 1>(dq, advance(a, i * 2048), advance(b, i * 2048), i > 0);
      wgmma_commit();
    }
  }
  __device__ __forceinline__ void reduce(const float (&dq)[32], int half) {
    if constexpr (kWithDq) {
      if (previous == kNone) return;
      const int head = previous >> kBlockBits, query_block = previous & ((1 << kBlockBits) - 1),
                slice = 2 * consumer + half;
      if constexpr (kDq == QueryGradient::turns) {
        const JobSide<D, kDq> side{sh, consumer, thread};
        side.wait(jobs);
        stage_query_gradient<64>(dq, sh.dq[consumer], row, lane, p.scale);
        side.give(jobs++, {head, query_block, slice, sh.unit.turn});
      } else {
        unsigned char* out = sh.dq[consumer];
        if (thread == 0) bulk_wait_read();
        named_barrier(2 + consumer, 128);
        stage_query_gradient<64>(dq, out, row, lane, p.scale);
        named_barrier(2 + consumer, 128);
        if (thread == 0) {
          for (int b = 0; b < 2; ++b)
            tma_reduce_add(&maps.dq, out + b * kBlock * 128, slice * 64 + b * 32, head,
                           query_block * kBlock);
          bulk_commit();
        }
      }
    }
  }

  /// Bits of the consumer's queries that use key r, moved to the thread's columns.
  __device__ __forceinline__ std::uint32_t allowed(const QueryTile& t, int r) {
    const std::uint64_t bits = allowed_queries(t, sh.key_queries[r], t.word[0], sh.unit.columns, r);
    return static_cast<std::uint32_t>(bits >> (consumer * kQueries)) >> (2 * (lane % 4));
  }
  __device__ __forceinline__ void probabilities(float (&s)[16], int stage) {
    const float* lse2 = sh.statistics[stage][0][0] + consumer * kQueries + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 l = *reinterpret_cast<const float2*>(lse2 + 8 * j);
      s[4 * j] = exp2_fast(s[4 * j] * p.scale_log2 - l.x);
      s[4 * j + 1] = exp2_fast(s[4 * j + 1] * p.scale_log2 - l.y);
      s[4 * j + 2] = exp2_fast(s[4 * j + 2] * p.scale_log2 - l.x);
      s[4 * j + 3] = exp2_fast(s[4 * j + 3] * p.scale_log2 - l.y);
    }
    const QueryTile& t = sh.tile[stage][0];
    if (t.state[0] == kWhole) return;
    const std::uint32_t allowed0 = allowed(t, row), allowed1 = allowed(t, row + 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(allowed0 >> (8 * j + e) & 1)) s[4 * j + e] = 0;
        if (!(allowed1 >> (8 * j + e) & 1)) s[4 * j + 2 + e] = 0;
      }
    }
  }
  __device__ __forceinline__ void score_gradients(const std::uint32_t (&probability)[8],
                                                  const float (&dp)[16], std::uint32_t (&ds)[8],
                                                  int stage) {
    const float* delta = sh.statistics[stage][0][1] + consumer * kQueries + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t pair = probability[2 * j + r];
        ds[2 * j + r] =
            pack_bf16(__uint_as_float(pair << 16) * (dp[4 * j + 2 * r] - d.x),
                      __uint_as_float(pair & 0xFFFF0000u) * (dp[4 * j + 2 * r + 1] - d.y));
      }
    }
  }
  /// The consumer's 32 queries of P^T or dS^T into shared memory: [key][64 queries], 128-byte
  /// swizzle.
  __device__ __forceinline__ void share(const std::uint32_t (&x)[8], unsigned char* to) {
    const int key = thread / 32 * 16 + lane % 16;
    const std::uint32_t base = smem_address(to) + key * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 4 * consumer + 2 * i + lane / 16;
      store_matrix_x4(base + ((column ^ (key & 7)) << 4), x + 4 * i);
    }
    fence_async_proxy();
  }

  /// One tile.  dQ of the tile before runs beside its exponentials and products; dK stays in
  /// flight.
  __device__ __forceinline__ void tile(float (&dk)[kColumns / 2], float (&dv)[kColumns / 2],
                                       int stage) {
    float s[16], dq[32];
    std::uint32_t a[8];
    wgmma_fence();
    issue_transposed(s, sh.k, sh.q[stage]);
    issue_query_gradient(dq, 0);
    wgmma_wait<kWithDq ? 1 : 0>();  // S, and dK of the previous tile
    if (previous != kNone) warp_arrive(&sh.empty[stage ^ 1]);
    probabilities(s, stage);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    share(a, probability(stage));
    named_barrier(kJoin, 256);
    barrier_wait(sh.dout_full, dout_parity);
    dout_parity ^= 1;
    float dp[16];
    wgmma_fence();
    issue_transposed(dp, sh.v, sh.dout[0]);
    issue_gradient(dv, probability(stage), sh.dout[0]);
    wgmma_wait<2>();  // the first half of dQ
    reduce(dq, 0);
    wgmma_fence();
    issue_query_gradient(dq, 1);
    wgmma_wait<kWithDq ? 2 : 1>();  // dP
    std::uint32_t ds[8];
    score_gradients(a, dp, ds, stage);
    share(ds, sh.ds[stage]);
    named_barrier(kMeet, 256);
    wgmma_fence();
    issue_gradient(dk, sh.ds[stage], sh.q[stage]);
    wgmma_wait<1>();  // dV and the second half of dQ
    warp_arrive(&sh.dout_empty);
    reduce(dq, 1);
  }
  __device__ __forceinline__ void unit(float (&dk)[kColumns / 2], float (&dv)[kColumns / 2]) {
    previous = kNone;
    while (true) {
      const int stage = uniform(ring.stage);
      barrier_wait(&sh.q_full[stage], ring.parity);
      const QueryTile& t = sh.tile[stage][0];
      if (t.end) break;
      tile(dk, dv, stage);
      previous = t.head << kBlockBits | t.query_block;
      ring.advance();
    }
    float dq[32];
    wgmma_fence();
    issue_query_gradient(dq, 0);
    wgmma_wait<0>();
    if (previous != kNone) warp_arrive(&sh.empty[ring.stage ^ 1]);
    reduce(dq, 0);
    wgmma_fence();
    issue_query_gradient(dq, 1);
    wgmma_wait<0>();
    reduce(dq, 1);
  }

  __device__ __forceinline__ void store(const float (&dk)[kColumns / 2],
                                        const float (&dv)[kColumns / 2], const WorkUnit& u) {
    const std::int64_t token = u.first_row + row;
    const std::int64_t left = (u.columns ? LLONG_MAX : p.index.shape.k_tokens) - token;
    const std::int64_t column_stride = p.index.column_heads() * D,
                       column = u.kv_head * D + consumer * kColumns;
    const std::int64_t dk_stride = u.columns ? column_stride : p.dk_stride,
                       dv_stride = u.columns ? column_stride : p.dv_stride;
    constexpr bool kTurns = kDq == QueryGradient::turns;
    const bool add = (p.add && !u.columns) || (kTurns ? u.part > 0 : u.parts > 1);
    if constexpr (kTurns) await_part(p, u, consumer, thread);
    store_key_gradient(dk, (u.columns ? p.column_dk : p.dk) + token * dk_stride + column, dk_stride,
                       p.scale, left, add);
    store_key_gradient(dv, (u.columns ? p.column_dv : p.dv) + token * dv_stride + column, dv_stride,
                       1.0f, left, add);
    if constexpr (kTurns) pass_part(p, u, consumer, thread);
  }

  __device__ __forceinline__ void run() {
    int kv_parity = 0;
    while (true) {
      barrier_wait(&sh.kv_full, kv_parity);
      kv_parity ^= 1;
      if (sh.unit.done) break;
      float dk[kColumns / 2], dv[kColumns / 2];
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) dk[i] = dv[i] = 0;
      unit(dk, dv);
      const WorkUnit u = sh.unit;
      warp_arrive(&sh.kv_empty);
      warp_arrive(&sh.empty[ring.stage]);
      ring.advance();
      store(dk, dv, u);
    }
    if constexpr (kDq == QueryGradient::turns) {
      JobSide<D, kDq>{sh, consumer, thread}.end(jobs);
    } else if (kWithDq && thread == 0) {
      bulk_wait();
    }
  }
};

template <QueryGradient kDq>
__global__ __launch_bounds__(kBackwardThreads, 1) void attention_backward_wide_kernel(
    const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  backward_roles<256, kDq, WideConsumer<kDq>>(raw, maps, p);
}

}  // namespace

cudaError_t backward_d256(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                          cudaStream_t stream) {
  using Shared = BackwardShared<256>;
  switch (dq) {
    case QueryGradient::apart:
      return launch_backward<Shared>(attention_backward_wide_kernel<QueryGradient::apart>, maps, p,
                                     stream);
    case QueryGradient::adds:
      return launch_backward<Shared>(attention_backward_wide_kernel<QueryGradient::adds>, maps, p,
                                     stream);
    case QueryGradient::turns:
      return launch_backward<Shared>(attention_backward_wide_kernel<QueryGradient::turns>, maps, p,
                                     stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ballast::cuda
