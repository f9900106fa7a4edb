// dQ alone, query-stationary, on Hopper: what backward runs before the key-stationary kernel where
// that one does not compute dQ (QueryGradient::apart).
//
// The key-stationary kernel adds dQ in L2 in whatever order its tiles finish.  Here each consumer
// owns 64 query rows instead, keeps their dQ in registers and walks the same stream of key tiles as
// forward, so every sum has one order.  The price is that S and dP are computed a second time: 7
// matrix products in all instead of 5.
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/query_tiles.cuh"

namespace ballast::cuda {
namespace {

struct QueryGradientParams {
  QueryWork work;
  float scale, scale_log2;
  const float* statistics;  // [q_heads, q_blocks, {lse2, delta}, 64]
  float* dq;
  std::int64_t dq_stride;
  bool add;
};

struct QueryGradientMaps {
  CUtensorMap q, dout;
  KeyMaps keys;
};

constexpr int gradient_stages(int d) { return d > 128 ? 1 : d > 64 ? 2 : 4; }
template <int D>
using GradientRing = KeyRing<D, gradient_stages(D), 2, tile_halves(D)>;

template <int D>
struct QueryGradientShared : GradientRing<D> {
  alignas(1024) unsigned char q[2][GradientRing<D>::kBlockBytes];
  alignas(1024) unsigned char dout[2][GradientRing<D>::kBlockBytes];
};

template <int D>
struct Consumer {
  using Shared = QueryGradientShared<D>;
  Shared& sh;
  const QueryGradientParams& p;
  const int consumer, thread, lane, row;
  RingPosition<Shared::kStages> ring;
  Interval seen[2];  // visible keys of the thread's rows
  const Interval* column_rows;
  float lse2[2], delta[2];

  __device__ Consumer(Shared& s, const QueryGradientParams& params, int which)
      : sh(s),
        p(params),
        consumer(uniform(which)),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        row(thread / 32 * 16 + lane / 4) {}

  /// 64 queries x 64 keys: Q K^T or dO V^T.
  __device__ __forceinline__ void issue_product(float (&acc)[32], const unsigned char* queries,
                                                const unsigned char* keys) {
    const std::uint32_t a = descriptor(queries), b = descriptor(keys);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int c = i / 4;
      Wgmma<64>::template ss<0, 0>(acc, advance(a, c * kBlock * 128 + i % 4 * 32),
                                   advance(b, c * Shared::kBoxStride + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  }
  /// One 64-key half of a stage: S, dP, dS, and dQ += dS K, which stays in flight.
  __device__ __forceinline__ void half_tile(float (&dq)[D / 2], int stage, int half, int state) {
    float s[32], dp[32];
    std::uint32_t ds[16];
    const unsigned char* k = sh.k[stage] + half * kBlock * 128;
    wgmma_fence();
    issue_product(s, sh.q[consumer], k);
    issue_product(dp, sh.dout[consumer], sh.v[stage] + half * kBlock * 128);
    wgmma_wait<1>();
    if (state != kWhole) {
      const auto& t = sh.tile[stage];
      const Interval a = t.columns ? column_rows[row] : seen[0],
                     b = t.columns ? column_rows[row + 8] : seen[1];
      mask_half<0>(s, allowed_columns(t, consumer, state, half, a, row),
                   allowed_columns(t, consumer, state, half, b, row + 8), lane);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = exp2_fast(s[i] * p.scale_log2 - lse2[i / 2 % 2]);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      ds[i] = pack_bf16(s[2 * i] * (dp[2 * i] - delta[i % 2]),
                        s[2 * i + 1] * (dp[2 * i + 1] - delta[i % 2]));
    }
    const std::uint32_t b = descriptor(k, Shared::kBoxStride);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) Wgmma<D>::template rs<1>(dq, ds + 4 * i, advance(b, i * 2048), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void store(const float (&dq)[D / 2], int query_block, int head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t token = static_cast<std::int64_t>(query_block) * kBlock + row + 8 * r;
      if (token >= p.work.index.shape.q_tokens) continue;
      float* out = p.dq + token * p.dq_stride + head * D + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        float2& to = *reinterpret_cast<float2*>(out + 8 * j);
        const float2 old = p.add ? to : make_float2(0, 0);
        to = make_float2(old.x + dq[4 * j + 2 * r] * p.scale,
                         old.y + dq[4 * j + 2 * r + 1] * p.scale);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const DeviceIndex& index = p.work.index;
    for (int count = 0;; ++count) {
      barrier_wait(&sh.q_full, count % 2);
      const WorkItem<2>& work = sh.work[count % Shared::kWorkSlots];
      const int query_block = work.query_block[consumer], head = work.head[consumer];
      if (work.query_block[0] < 0) return;
      const bool exists = query_block < index.shape.q_blocks();
      if (exists) {
        const std::int64_t first = static_cast<std::int64_t>(query_block) * kBlock;
        const float* statistics =
            p.statistics + (head * index.shape.q_blocks() + query_block) * 2 * kBlock + row;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          seen[r] = index.rows[first + row + 8 * r];
          lse2[r] = statistics[8 * r];
          delta[r] = statistics[kBlock + 8 * r];
        }
        if (index.has_columns())
          column_rows = index.column_bounds +
                        work.index_head[consumer] * index.shape.q_blocks() * kBlock + first;
      }
      float dq[D / 2];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dq[i] = 0;
      while (true) {
        const int stage = uniform(ring.stage);
        barrier_wait(&sh.k_full[stage], ring.parity);
        const int state = uniform(sh.tile[stage].state[consumer]);
        if (state == kEnd) break;
        barrier_wait(&sh.v_full[stage], ring.parity);
        if ((state & 0xFF) != kSkip) half_tile(dq, stage, 0, state & 0xFF);
        if (Shared::kHalves == 2 && state >> 8 != kSkip) half_tile(dq, stage, 1, state >> 8);
        wgmma_wait<0>();
        warp_arrive(&sh.empty[stage]);
        ring.advance();
      }
      warp_arrive(&sh.q_empty);
      warp_arrive(&sh.empty[ring.stage]);
      ring.advance();
      if (exists) store(dq, query_block, head);
    }
  }
};

template <int D>
__global__ __launch_bounds__(
    QueryGradientShared<D>::kThreads,
    1) void attention_query_gradient_kernel(const __grid_constant__ QueryGradientMaps maps,
                                            const __grid_constant__ QueryGradientParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sh = *reinterpret_cast<QueryGradientShared<D>*>(raw);
  if (threadIdx.x == 0) sh.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_release<56>();
    if (threadIdx.x == 0) produce(sh, maps.keys, p.work);
    if (threadIdx.x == 32) {
      fetch_queries(sh, [&](const WorkItem<2>& w) {
        for (int i = 0; i < 2; ++i) {
          barrier_expect(&sh.q_full, 2 * QueryGradientShared<D>::kBlockBytes);
          for (int c = 0; c < QueryGradientShared<D>::kBoxes; ++c) {
            tma_load(sh.q[i] + c * kBlock * 128, &maps.q, &sh.q_full, c * 64, w.head[i],
                     w.query_block[i] * kBlock);
            tma_load(sh.dout[i] + c * kBlock * 128, &maps.dout, &sh.q_full, c * 64, w.head[i],
                     w.query_block[i] * kBlock);
          }
        }
      });
    }
  } else {
    registers_claim<224>();
    Consumer<D>(sh, p, threadIdx.x / 128 - 1).run();
  }
}

template <int D>
cudaError_t launch_query_gradient(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                                  cudaStream_t stream) {
  using Shared = QueryGradientShared<D>;
  QueryGradientParams p;
  p.work = query_work(*a.index, D, 2, scratch.counters + 1);
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.statistics = scratch.statistics;
  p.dq = a.dq;
  p.dq_stride = a.dq_stride;
  p.add = a.accumulate_dq;
  QueryGradientMaps maps;
  cudaError_t e = hopper::make_tensor_map(&maps.q, a.q, false, a.head_dim, a.q_heads,
                                          a.index->shape.q_tokens, a.q_stride);
  if (e == cudaSuccess)
    e = hopper::make_tensor_map(&maps.dout, a.dout, false, a.head_dim, a.q_heads,
                                a.index->shape.q_tokens, a.dout_stride);
  if (e == cudaSuccess) e = make_key_maps<Shared>(maps.keys, a, scratch);
  if (e != cudaSuccess) return e;
  return launch_persistent<Shared>(attention_query_gradient_kernel<D>, p.work.items, stream, maps,
                                   p);
}

}  // namespace

cudaError_t query_gradient_sm90(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                                cudaStream_t stream) {
  return at_head_dim(a.head_dim, [&](auto d) {
    return launch_query_gradient<decltype(d)::value>(a, scratch, stream);
  });
}

}  // namespace ballast::cuda
