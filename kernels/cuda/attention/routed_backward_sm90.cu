// Attention backward of gathered queries over whole pattern blocks on Hopper (MoBA): the
// key-stationary kernel of backward_sm90.cuh on tiles of 64 rows that a producer warpgroup gathers
// from routed lists.  Each tile's 128 keys are seen whole; dQ is added row by row, dK and dV by
// units.
#include "kernels/cuda/attention/backward_sm90.cuh"
#include "kernels/cuda/attention/routed_rows.cuh"

namespace ballast::cuda {
namespace {

struct RoutedBackwardParams {
  RoutedClaims claims;
  const std::uint32_t* entries;
  RowsOf q, dout;
};

template <int D>
struct RowProducer {
  using Shared = BackwardShared<D, true>;
  static constexpr int kRows = kBlock / 4;  // of a warp
  Shared& sh;
  const BackwardMaps& maps;
  const BackwardParams& p;
  const RoutedBackwardParams& routed;
  const int thread, lane, warp;
  RingPosition<kQueryStages> ring;
  int tiles = 0;

  __device__ RowProducer(Shared& s, const BackwardMaps& m, const BackwardParams& params,
                         const RoutedBackwardParams& r)
      : sh(s),
        maps(m),
        p(params),
        routed(r),
        thread(threadIdx.x),
        lane(thread % 32),
        warp(thread / 32) {}

  __device__ void load_keys(const RoutedUnit& u, int first_key) {
    WorkUnit& unit = sh.unit;
    unit.done = u.rows == 0;
    unit.columns = unit.part = 0;
    unit.parts = 1;
    unit.first_row = unit.first_key = first_key;
    unit.kv_head = u.kv_head;
    if (!unit.done) {
      barrier_expect(&sh.kv_full, 2 * Shared::kUnitBlocks * Shared::kBlockBytes);
      for (int half = 0; half < Shared::kUnitBlocks; ++half) {
        for (int c = 0; c < Shared::kBoxes; ++c) {
          const int at = c * Shared::kKeyBoxStride + half * kBlock * 128;
          tma_load(sh.k + at, &maps.k, &sh.kv_full, c * 64, u.kv_head, first_key + half * kBlock);
          tma_load(sh.v + at, &maps.v, &sh.kv_full, c * 64, u.kv_head, first_key + half * kBlock);
        }
      }
    }
    barrier_arrive(&sh.kv_full);
  }
  __device__ __forceinline__ void tile(std::uint32_t entry, const RowsOf& q, const RowsOf& dout,
                                       int first_head) {
    const int s = ring.stage;
    barrier_wait(&sh.empty[s], ring.parity ^ 1);
    const int slot = tiles++ % Shared::kRowSlots;
    if (thread == 0) {
      QueryTile& t = sh.tile[s][0];
      t.end = t.head = 0;
      t.query_block = slot;
      t.state[0] = t.state[1] = kWhole;
    }
    gather_rows<D, kRows>(sh.q[s], warp * kRows, entry, q, lane);
    gather_rows<D, kRows>(sh.dout[s], warp * kRows, entry, dout, lane);
    // Lanes 0 to 15 fetch lse2, the others delta, of the warp's rows; +inf makes P zero.
    const int which = lane / kRows, row = warp * kRows + lane % kRows;
    float statistic = which == 0 ? INFINITY : 0.0f;
    if (entry != kNoRow) {
      const std::int64_t token = entry >> 4, head = first_head + (entry & 15);
      statistic = __ldg(p.statistics +
                        ((head * p.index.shape.q_blocks() + token / kBlock) * 2 + which) * kBlock +
                        token % kBlock);
    }
    sh.statistics[s][0][which][row] = statistic;
    if (which == 0) sh.rows[slot][row] = entry;
    copies_done();
    barrier_arrive(&sh.q_full[s]);
    barrier_arrive(&sh.dout_full[s]);
    ring.advance();
  }
  __device__ void end() {
    barrier_wait(&sh.empty[ring.stage], ring.parity ^ 1);
    if (thread == 0) sh.tile[ring.stage][0].end = 1;
    barrier_arrive(&sh.q_full[ring.stage]);
    barrier_arrive(&sh.dout_full[ring.stage]);
    ring.advance();
  }

  __device__ void run(RoutedUnit (&units)[2], int (&parts)[2]) {
    for (int n = 0;; ++n) {
      if (thread == 0) {
        units[n % 2] = routed.claims.next(parts[n % 2]);
        barrier_wait(&sh.kv_empty, n % 2 ^ 1);
        load_keys(units[n % 2], units[n % 2].key + parts[n % 2] * Shared::kUnitKeys);
      }
      named_barrier(1, kRowProducers);
      const RoutedUnit u = units[n % 2];
      if (u.rows == 0) return;
      const int first_head = u.kv_head * p.group;
      const RowsOf q{routed.q.base + static_cast<std::int64_t>(first_head) * D, routed.q.stride},
          dout{routed.dout.base + static_cast<std::int64_t>(first_head) * D, routed.dout.stride};
      const std::uint32_t* entries = routed.entries + u.begin;
      const auto entry_at = [&](int row) { return row < u.rows ? __ldg(entries + row) : kNoRow; };
      const int mine = warp * kRows + lane % kRows;
      std::uint32_t entry = entry_at(mine);
      for (int first = 0; first < u.rows; first += kBlock) {
        const std::uint32_t next = entry_at(first + kBlock + mine);
        tile(entry, q, dout, first_head);
        entry = next;
      }
      end();
    }
  }
};

template <int D>
struct RoutedBackwardShared : BackwardShared<D, true> {
  RoutedUnit units[2];
  int parts[2];
};

template <int D>
__global__ __launch_bounds__(kBackwardThreads, 1) void routed_backward_kernel(
    const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardParams p,
    const __grid_constant__ RoutedBackwardParams routed) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sh = *reinterpret_cast<RoutedBackwardShared<D>*>(raw);
  if (threadIdx.x == 0) sh.init();
  __syncthreads();
  if (threadIdx.x < kRowProducers) {
    registers_release<40>();
    RowProducer<D>(sh, maps, p, routed).run(sh.units, sh.parts);
  } else {
    registers_claim<232>();
    BackwardConsumer<D, QueryGradient::rows>(sh, maps, p, threadIdx.x / 128 - 1).run();
  }
}

template <int D>
cudaError_t launch_rows(const BackwardMaps& maps, const BackwardParams& p,
                        const RoutedBackwardParams& routed, cudaStream_t stream) {
  using Shared = RoutedBackwardShared<D>;
  static_assert(sizeof(Shared) <= 232448);
  const auto kernel = routed_backward_kernel<D>;
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e == cudaSuccess) e = cudaMemsetAsync(routed.claims.counter, 0, sizeof(int), stream);
  if (e != cudaSuccess) return e;
  kernel<<<processors, kBackwardThreads, sizeof(Shared), stream>>>(maps, p, routed);
  return cudaGetLastError();
}

}  // namespace

cudaError_t routed_backward_sm90(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                                 cudaStream_t stream) {
  const RoutedIndex& index = a.routed->index;
  if (a.routed->entries() == 0) return cudaSuccess;
  BackwardParams p{};
  p.index = *a.index;
  p.group = a.q_heads / a.kv_heads;
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.statistics = scratch.statistics;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dk_stride = a.dk_stride;
  p.dv_stride = a.dv_stride;
  p.add = true;
  p.dq = a.dq;
  p.dq_stride = a.dq_stride;
  const RoutedBackwardParams routed{{index.units, index.unit_offset, 0, index.lists(),
                                     index.block_tokens / kKeyTile, scratch.counters},
                                    index.entries,
                                    {static_cast<const __nv_bfloat16*>(a.q), a.q_stride},
                                    {static_cast<const __nv_bfloat16*>(a.dout), a.dout_stride}};
  BackwardMaps maps{};
  const std::int64_t tokens = a.index->shape.k_tokens;
  cudaError_t e = make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, tokens, a.k_stride);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, tokens, a.v_stride);
  if (e != cudaSuccess) return e;
  return a.head_dim == 64 ? launch_rows<64>(maps, p, routed, stream)
                          : launch_rows<128>(maps, p, routed, stream);
}

}  // namespace ballast::cuda
