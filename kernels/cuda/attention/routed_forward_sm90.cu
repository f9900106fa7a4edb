// Attention of gathered queries over whole pattern blocks on Hopper (MoBA): key-stationary.
//
// A unit of work is one pattern block's keys and values, which stay in shared memory, and a list of
// the query rows that chose it.  Tiles of 128 rows are gathered by the producer warpgroup; each of
// two consumer warpgroups takes 64 and computes a complete softmax over the block: one product, one
// maximum, one sum, one product, no rescaling and no mask.  Partial outputs and their LSE lie where
// the row stands in its list; combine_kernel() merges a row's partials with its own block's.
#include <algorithm>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/attention/routed_rows.cuh"
#include "kernels/cuda/attention/tiles.cuh"

namespace ballast::cuda {
namespace {

constexpr int kTileRows = 2 * kBlock, kStages = 2, kThreads = 384;

struct RoutedForwardParams {
  RoutedClaims claims;
  const std::uint32_t* entries;
  RowsOf q;
  int group;
  float scale, scale_log2;
  __nv_bfloat16* partial;  // [entries from `begin` on, head_dim]
  float* partial_lse;
  std::int64_t begin;
};

struct RoutedKeyMaps {
  CUtensorMap k, v;
};

template <int D, int kKeys>
struct RoutedShared {
  static constexpr int kBoxes = D / 64, kBoxStride = kKeys * 128;
  alignas(1024) unsigned char k[kBoxes * kBoxStride];
  alignas(1024) unsigned char v[kBoxes * kBoxStride];
  alignas(1024) unsigned char q[kStages][2][kBoxes * kBlock * 128];
  std::uint64_t kv_full, kv_empty, q_full[kStages], q_empty[kStages];
  RoutedUnit unit[2];

  __device__ void init() {
    constexpr int kArrivals = 8 * kWarpArrivals;
    barrier_init(&kv_full, 1);
    barrier_init(&kv_empty, kArrivals);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(&q_full[s], kRowProducers);
      barrier_init(&q_empty[s], kArrivals);
    }
    barrier_init_fence();
  }
};

template <int D, int kKeys>
__device__ void load_unit(RoutedShared<D, kKeys>& sh, const RoutedKeyMaps& maps,
                          const RoutedUnit& u) {
  using Shared = RoutedShared<D, kKeys>;
  if (u.rows > 0) {
    barrier_expect(&sh.kv_full, 2 * sizeof(sh.k));
    for (int c = 0; c < Shared::kBoxes; ++c) {
      tma_load(sh.k + c * Shared::kBoxStride, &maps.k, &sh.kv_full, c * 64, u.kv_head, u.key);
      tma_load(sh.v + c * Shared::kBoxStride, &maps.v, &sh.kv_full, c * 64, u.kv_head, u.key);
    }
  }
  barrier_arrive(&sh.kv_full);
}

template <int D, int kKeys>
__device__ void produce_rows(RoutedShared<D, kKeys>& sh, const RoutedKeyMaps& maps,
                             const RoutedForwardParams& p) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  RingPosition<kStages> ring;
  for (int n = 0;; ++n) {
    if (thread == 0) {
      int part;
      sh.unit[n % 2] = p.claims.next(part);
    }
    named_barrier(1, kRowProducers);
    const RoutedUnit u = sh.unit[n % 2];
    if (thread == 0) {
      barrier_wait(&sh.kv_empty, n % 2 ^ 1);
      load_unit(sh, maps, u);
    }
    __syncwarp();
    if (u.rows == 0) return;
    const RowsOf q{p.q.base + static_cast<std::int64_t>(u.kv_head) * p.group * D, p.q.stride};
    const std::uint32_t* entries = p.entries + u.begin;
    const auto entry_at = [&](int row) { return row < u.rows ? __ldg(entries + row) : kNoRow; };
    std::uint32_t entry = entry_at(thread);
    for (int first = 0; first < u.rows; first += kTileRows) {
      const int s = ring.stage;
      barrier_wait(&sh.q_empty[s], ring.parity ^ 1);
      gather_rows<D, 32>(sh.q[s][warp / 2], warp % 2 * 32, entry, q, lane);
      entry = entry_at(first + kTileRows + thread);
      copies_done();
      barrier_arrive(&sh.q_full[s]);
      ring.advance();
    }
  }
}

template <int D, int kKeys>
struct RoutedConsumer {
  using Shared = RoutedShared<D, kKeys>;
  Shared& sh;
  const RoutedForwardParams& p;
  const int consumer, lane, row;
  RingPosition<kStages> ring;

  __device__ RoutedConsumer(Shared& s, const RoutedForwardParams& params, int which)
      : sh(s),
        p(params),
        consumer(uniform(which)),
        lane(threadIdx.x % 32),
        row(threadIdx.x % 128 / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ void scores(float (&s)[kKeys / 2]) {
    const std::uint32_t a = descriptor(sh.q[uniform(ring.stage)][consumer]), b = descriptor(sh.k);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int c = i / 4;
      Wgmma<kKeys>::template ss<0, 0>(s, advance(a, c * kBlock * 128 + i % 4 * 32),
                                      advance(b, c * Shared::kBoxStride + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  }
  /// s becomes P, not yet divided by its sum.
  __device__ __forceinline__ void softmax(float (&s)[kKeys / 2], float (&top)[2], float (&sum)[2]) {
    float m[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, part[4] = {}, shift[2];
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int chain = i % 4 / 2 + 2 * (i / 4 % 2);
      m[chain] = fmaxf(m[chain], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(m[r], m[r + 2]);
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      top[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      shift[r] = top[r] * p.scale_log2;
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = exp2_fast(s[i] * p.scale_log2 - shift[i % 4 / 2]);
      part[i % 4 / 2 + 2 * (i / 4 % 2)] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = part[r] + part[r + 2];
      x += __shfl_xor_sync(~0u, x, 1);
      sum[r] = x + __shfl_xor_sync(~0u, x, 2);
    }
  }
  __device__ __forceinline__ void output(float (&o)[D / 2],
                                         const std::uint32_t (&probability)[kKeys / 4]) {
    const std::uint32_t b = descriptor(sh.v, Shared::kBoxStride);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      Wgmma<D>::template rs<1>(o, probability + 4 * i, advance(b, i * 2048), i > 0);
    wgmma_commit();
  }
  /// Partial outputs of the thread's rows among `rows` from entry `at` on.
  __device__ __forceinline__ void store(const float (&o)[D / 2], const float (&top)[2],
                                        const float (&sum)[2], std::int64_t at, int rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = 1.0f / sum[r];
      const std::int64_t entry = at + row + 8 * r;
      const bool stored = row + 8 * r < rows;
      if (stored && lane % 4 == 0) p.partial_lse[entry] = top[r] * p.scale + logf(sum[r]);
      __nv_bfloat16* out = p.partial + entry * D + 8 * (lane % 4);
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        std::uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          w[i] = pack_bf16(o[4 * (j + i) + 2 * r] * inverse, o[4 * (j + i) + 2 * r + 1] * inverse);
        transpose_quad(w, lane);
        if (stored) *reinterpret_cast<uint4*>(out + 8 * j) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }

  __device__ __forceinline__ void tile(std::int64_t at, int rows) {
    float s[kKeys / 2], top[2], sum[2];
    std::uint32_t probability[kKeys / 4];
    barrier_wait(&sh.q_full[ring.stage], ring.parity);
    scores(s);
    wgmma_wait<0>();
    warp_arrive(&sh.q_empty[ring.stage]);
    ring.advance();
    softmax(s, top, sum);
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) probability[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    float o[D / 2];
    output(o, probability);
    wgmma_wait<0>();
    store(o, top, sum, at, rows);
  }

  __device__ __forceinline__ void run() {
    for (int n = 0;; ++n) {
      barrier_wait(&sh.kv_full, n % 2);
      const RoutedUnit u = sh.unit[n % 2];
      const int rows = uniform(u.rows);
      if (rows == 0) return;
      for (int first = 0; first < rows; first += kTileRows) {
        const int mine = first + consumer * kBlock;
        tile(u.begin - p.begin + mine, rows - mine);
      }
      warp_arrive(&sh.kv_empty);
    }
  }
};

template <int D, int kKeys>
__global__ __launch_bounds__(kThreads, 1) void routed_forward_kernel(
    const __grid_constant__ RoutedKeyMaps maps, const __grid_constant__ RoutedForwardParams p) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto& sh = *reinterpret_cast<RoutedShared<D, kKeys>*>(raw);
  if (threadIdx.x == 0) sh.init();
  __syncthreads();
  if (threadIdx.x < kRowProducers) {
    registers_release<56>();
    produce_rows(sh, maps, p);
  } else {
    registers_claim<224>();
    RoutedConsumer<D, kKeys>(sh, p, threadIdx.x / 128 - 1).run();
  }
}

// --- combine
// -------------------------------------------------------------------------------------------------
struct Partials {
  RoutedIndex index;
  const __nv_bfloat16* o;  // from entry `begin` on
  const float* lse;
  std::int64_t begin;
  int first_block;  // query blocks from here on
};

template <class T>
__device__ __forceinline__ void load_pair(float (&x)[2], const T* p) {
  if constexpr (sizeof(T) == 4) {
    const float2 raw = *reinterpret_cast<const float2*>(p);
    x[0] = raw.x, x[1] = raw.y;
  } else {
    const std::uint32_t raw = *reinterpret_cast<const std::uint32_t*>(p);
    x[0] = __uint_as_float(raw << 16), x[1] = __uint_as_float(raw & 0xFFFF0000u);
  }
}
template <class T>
__device__ __forceinline__ void store_pair(T* p, float x, float y) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(p) = make_float2(x, y);
  } else {
    *reinterpret_cast<std::uint32_t*>(p) = pack_bf16(x, y);
  }
}

/// A warp a (row, head), a CTA 8 of them: o and lse hold the own block's and become the whole
/// row's, in the order of the blocks.  Rows that list nothing are whole already.
template <int D, class Out>
__global__ __launch_bounds__(256) void combine_kernel(const Partials x, Out* o,
                                                      std::int64_t o_stride, float* lse) {
  constexpr int kPairs = D / 64;  // of columns a lane
  const int lane = threadIdx.x % 32;
  const RoutedIndex& index = x.index;
  const std::int64_t item = blockIdx.x * 8ll + threadIdx.x / 32;
  const int head = static_cast<int>(item % index.q_heads);
  const std::int64_t token = x.first_block * std::int64_t{kBlock} + item / index.q_heads;
  const int b = static_cast<int>(token / kBlock);
  if (token >= index.q_tokens || token % kBlock >= index.queries.rows[b]) return;
  const int count = index.listed(b);
  if (count == 0) return;
  const std::int32_t* places =
      index.places +
      (static_cast<std::int64_t>(head) * index.queries.blocks * kBlock + token) * index.slots;
  const auto lse_of = [&](int place) { return x.lse[place - x.begin]; };
  float* my_lse = lse + head * index.q_tokens + token;
  const float own = *my_lse;
  float top = own;
  for (int i = lane; i < count; i += 32) top = fmaxf(top, lse_of(places[i]));
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float own_weight = expf(own - top);
  Out* out = o + token * o_stride + head * D + 2 * lane;
  float acc[kPairs][2], sum = own_weight;
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    load_pair(acc[c], out + 64 * c);
    acc[c][0] *= own_weight, acc[c][1] *= own_weight;
  }
  for (int from = 0; from < count; from += 32) {
    const int place = from + lane < count ? places[from + lane] : 0;
    const float weight = from + lane < count ? expf(lse_of(place) - top) : 0;
    const int n = min(32, count - from);
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
      const float w = __shfl_sync(~0u, weight, i);
      const __nv_bfloat16* row = x.o + (__shfl_sync(~0u, place, i) - x.begin) * D + 2 * lane;
      sum += w;
#pragma unroll
      for (int c = 0; c < kPairs; ++c) {
        float y[2];
        load_pair(y, row + 64 * c);
        acc[c][0] += w * y[0], acc[c][1] += w * y[1];
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kPairs; ++c) store_pair(out + 64 * c, acc[c][0] / sum, acc[c][1] / sum);
  if (lane == 0) *my_lse = top + logf(sum);
}

// --- host
// -------------------------------------------------------------------------------------------------
/// The chunks [first, last) whose partials fit in the workspace at a time.
int chunks_together(const RoutedWork& w, int head_dim, int first) {
  const int chunks = w.index.chunks();
  int last = first + 1;
  while (last < chunks &&
         (w.chunk_begin[last + 1] - w.chunk_begin[first]) * head_dim * 2 <= kRoutedPartialBytes)
    ++last;
  return last;
}

template <int D, int kKeys>
cudaError_t launch_units(const RoutedKeyMaps& maps, const RoutedForwardParams& p,
                         cudaStream_t stream) {
  using Shared = RoutedShared<D, kKeys>;
  static_assert(sizeof(Shared) <= 232448);
  const auto kernel = routed_forward_kernel<D, kKeys>;
  int device = 0, processors = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e == cudaSuccess) e = cudaMemsetAsync(p.claims.counter, 0, sizeof(int), stream);
  if (e != cudaSuccess) return e;
  kernel<<<processors, kThreads, sizeof(Shared), stream>>>(maps, p);
  return cudaGetLastError();
}

template <int D>
cudaError_t launch_chunks(const AttentionForwardArgs& a, RoutedForwardParams p,
                          const RoutedKeyMaps& maps, cudaStream_t stream) {
  const RoutedWork& work = *a.routed;
  const RoutedIndex& index = work.index;
  for (int first = 0, last; first < index.chunks(); first = last) {
    last = chunks_together(work, D, first);
    p.begin = work.chunk_begin[first];
    if (work.chunk_begin[last] == p.begin) continue;
    p.claims.first_list = first * index.kv_heads * index.blocks;
    p.claims.last_list = last * index.kv_heads * index.blocks;
    const cudaError_t e = index.block_tokens == 256 ? launch_units<D, 256>(maps, p, stream)
                                                    : launch_units<D, 128>(maps, p, stream);
    if (e != cudaSuccess) return e;
    const Partials partials{index, p.partial, p.partial_lse, p.begin, first * kRoutedChunk};
    const std::int64_t rows =
        std::min<std::int64_t>(index.q_tokens, std::int64_t{last} * kRoutedChunk * kBlock) -
        std::int64_t{first} * kRoutedChunk * kBlock;
    const auto grid = static_cast<unsigned>((rows * index.q_heads + 7) / 8);
    if (a.o_fp32) {
      combine_kernel<D>
          <<<grid, 256, 0, stream>>>(partials, static_cast<float*>(a.o), a.o_stride, a.lse);
    } else {
      combine_kernel<D>
          <<<grid, 256, 0, stream>>>(partials, static_cast<__nv_bfloat16*>(a.o), a.o_stride, a.lse);
    }
  }
  return cudaGetLastError();
}

}  // namespace

std::int64_t routed_partials(const RoutedWork& work, int head_dim) {
  std::int64_t most = 0;
  for (int first = 0, last; first < work.index.chunks(); first = last) {
    last = chunks_together(work, head_dim, first);
    most = std::max(most, work.chunk_begin[last] - work.chunk_begin[first]);
  }
  return most;
}

cudaError_t routed_forward_sm90(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                                cudaStream_t stream) {
  const RoutedIndex& index = a.routed->index;
  RoutedForwardParams p;
  p.claims = {index.units, index.unit_offset, 0, 0, 1, scratch.counters};
  p.entries = index.entries;
  p.q = {static_cast<const __nv_bfloat16*>(a.q), a.q_stride};
  p.group = a.q_heads / a.kv_heads;
  p.scale = a.scale;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.partial = static_cast<__nv_bfloat16*>(scratch.partial_o);
  p.partial_lse = scratch.partial_lse;
  RoutedKeyMaps maps;
  const std::int64_t tokens = a.index->shape.k_tokens;
  cudaError_t e = make_tensor_map(&maps.k, a.k, false, a.head_dim, a.kv_heads, tokens, a.k_stride,
                                  index.block_tokens);
  if (e == cudaSuccess)
    e = make_tensor_map(&maps.v, a.v, false, a.head_dim, a.kv_heads, tokens, a.v_stride,
                        index.block_tokens);
  if (e != cudaSuccess) return e;
  return a.head_dim == 64 ? launch_chunks<64>(a, p, maps, stream)
                          : launch_chunks<128>(a, p, maps, stream);
}

}  // namespace ballast::cuda
