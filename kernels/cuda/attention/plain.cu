// Attention for any GPU from sm_80 on, and the cross-check of the Hopper kernels: 64 x 64 tiles
// through shared memory and the warp matrix functions of CUDA C++ (nvcuda::wmma).  Simple on
// purpose, and deterministic: forward and dQ are query-stationary, dK and dV key-stationary,
// nothing is added by atomics.
#include <cuda_bf16.h>
#include <mma.h>

#include <climits>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/attention/tiles.cuh"

namespace ballast::cuda {
namespace {
namespace wmma = nvcuda::wmma;
using bf16 = __nv_bfloat16;

constexpr int kThreads = 128;  // warp w computes rows [16 w, 16 w + 16) of every product
constexpr float kLog2E = 1.4426950408889634f;

/// Columns of an output that a thread block keeps in registers at a time.
constexpr int part_columns(int d) { return d > 128 ? 128 : d; }

struct Tensor3 {
  const bf16* data;
  std::int64_t stride;
  std::int64_t tokens;
};

struct PlainParams {
  DeviceIndex index;
  Tensor3 q, k, v, dout, column_k, column_v;
  int group;
  float scale;
  void* o;
  std::int64_t o_stride;
  bool o_fp32;
  float* lse;
  const float* statistics;
  float *dq, *dk, *dv, *column_dk, *column_dv;
  std::int64_t dq_stride, dk_stride, dv_stride;
  bool accumulate_dq, accumulate_dkv;
};

using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
using RowMajorA = wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major>;
using ColMajorA = wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::col_major>;
using RowMajorB = wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::row_major>;
using ColMajorB = wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::col_major>;

/// 64 rows of one head into shared memory; rows outside the tensor are zero.
template <int D>
__device__ void load_tile(bf16* to, const Tensor3& from, std::int64_t first, int head) {
  for (int i = threadIdx.x; i < kBlock * D; i += kThreads) {
    const std::int64_t token = first + i / D;
    to[i] = token >= 0 && token < from.tokens ? from.data[token * from.stride + head * D + i % D]
                                              : bf16(0.0f);
  }
}

/// out[64][64] = a[64][D] b[64][D]^T for the warp's 16 rows.
template <int D>
__device__ void product_transposed(float* out, const bf16* a, const bf16* b) {
  const int row = threadIdx.x / 32 * 16;
#pragma unroll 1  // as quick when unrolled, but compiles for longer
  for (int column = 0; column < kBlock; column += 16) {
    Accumulator c;
    wmma::fill_fragment(c, 0.0f);
    for (int k = 0; k < D; k += 16) {
      RowMajorA x;
      ColMajorB y;
      wmma::load_matrix_sync(x, a + row * D + k, D);
      wmma::load_matrix_sync(y, b + column * D + k, D);
      wmma::mma_sync(c, x, y, c);
    }
    wmma::store_matrix_sync(out + row * kBlock + column, c, kBlock, wmma::mem_row_major);
  }
}
/// acc[16 rows][N] += a b with a [64][64], or its transpose, and N columns of b [64][D].
template <int D, class MatrixA, int N>
__device__ void accumulate(Accumulator (&acc)[N], const bf16* a, const bf16* b) {
  const int row = threadIdx.x / 32 * 16;
  constexpr bool kTransposed = std::is_same_v<MatrixA, ColMajorA>;
#pragma unroll 1
  for (int k = 0; k < kBlock; k += 16) {
    MatrixA x;
    wmma::load_matrix_sync(x, kTransposed ? a + k * kBlock + row : a + row * kBlock + k, kBlock);
#pragma unroll
    for (int c = 0; c < N; ++c) {
      RowMajorB y;
      wmma::load_matrix_sync(y, b + k * D + c * 16, D);
      wmma::mma_sync(acc[c], x, y, acc[c]);
    }
  }
}

/// One pair of a query block and 64 keys (of the key axis or of a column list).
struct TilePair {
  const Interval* rows;  // visible keys of the block's rows, counted like `key`
  int key;
  bool columns;
  std::uint64_t word;  // row mask, or cover word for columns
  __device__ bool allowed(int r, int c) const {
    if (columns ? word >> c & 1 : !(word >> r & 1)) return false;
    return key + c >= rows[r].begin && key + c < rows[r].end;
  }
};

/// Calls f(pair, k tensor, v tensor, key row to load, key head to load) for all tiles of a query
/// block.
template <class F>
__device__ void for_each_key_tile(const PlainParams& p, int qb, int head, F f) {
  const DeviceIndex& x = p.index;
  const int h = x.shape.index_heads == 1 ? 0 : head, kv_head = head / p.group;
  const Interval* rows = x.rows + static_cast<std::int64_t>(qb) * kBlock;
  RunCursor cursor;
  open_query_block(cursor, x, h, qb);
  for (; cursor.block != INT_MAX; cursor.pop()) {
    const int key = cursor.block * kBlock;
    if (visible_state(x.bounds[qb], key) == kSkip) continue;
    f(TilePair{rows, key, false, cursor.mask >= 0 ? x.row_masks[cursor.mask] : kAllRows}, p.k, p.v,
      key, kv_head);
  }
  if (!x.has_columns()) return;
  const BlockBounds bounds = column_block_bounds(x, h, qb);
  const Interval* column_rows = x.column_bounds + (h * x.shape.q_blocks() + qb) * kBlock;
  const int first_row = x.column_row_offset[h * x.shape.segments + x.block_segment[qb]];
  for (int key = bounds.begin_first / kBlock * kBlock; key < bounds.end_last; key += kBlock) {
    f(TilePair{column_rows, key, true, cover_word(x, h, qb, key / kBlock)}, p.column_k, p.column_v,
      first_row + key, x.shape.index_heads == 1 ? kv_head : 0);
  }
}

template <int D>
struct ForwardShared {
  bf16 q[kBlock * D], kv[kBlock * D], probability[kBlock * kBlock];
  float s[kBlock * kBlock], o[kBlock * D];
  float top[kBlock], sum[kBlock];
};

template <int D>
__global__ void __launch_bounds__(kThreads) forward_plain_kernel(PlainParams p) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& sh = *reinterpret_cast<ForwardShared<D>*>(raw);
  const int qb = blockIdx.x, head = blockIdx.y;
  const std::int64_t first = static_cast<std::int64_t>(qb) * kBlock;
  load_tile<D>(sh.q, p.q, first, head);
  for (int i = threadIdx.x; i < kBlock * D; i += kThreads) sh.o[i] = 0;
  if (threadIdx.x < kBlock) {
    sh.top[threadIdx.x] = -INFINITY;
    sh.sum[threadIdx.x] = 0;
  }
  for_each_key_tile(p, qb, head,
                    [&](const TilePair& pair, const Tensor3& k, const Tensor3& v,
                        std::int64_t token, int kv_head) {
                      __syncthreads();
                      load_tile<D>(sh.kv, k, token, kv_head);
                      __syncthreads();
                      product_transposed<D>(sh.s, sh.q, sh.kv);
                      __syncthreads();
                      load_tile<D>(sh.kv, v, token, kv_head);
                      if (threadIdx.x < kBlock) {  // a thread a row
                        const int r = threadIdx.x;
                        float* s = sh.s + r * kBlock;
                        float top = sh.top[r];
                        for (int c = 0; c < kBlock; ++c) {
                          s[c] = pair.allowed(r, c) ? s[c] * p.scale : -INFINITY;
                          top = fmaxf(top, s[c]);
                        }
                        const float shift = top == -INFINITY ? 0.0f : top,
                                    factor = expf(sh.top[r] - shift);
                        float sum = sh.sum[r] * factor;
                        for (int c = 0; c < kBlock; ++c) {
                          const float e = expf(s[c] - shift);
                          sum += e;
                          sh.probability[r * kBlock + c] = bf16(e);
                        }
                        for (int d = 0; d < D; ++d) sh.o[r * D + d] *= factor;
                        sh.top[r] = top;
                        sh.sum[r] = sum;
                      }
                      __syncthreads();
                      constexpr int kColumns = part_columns(D);
                      for (int part = 0; part < D; part += kColumns) {
                        Accumulator acc[kColumns / 16];
                        float* o = sh.o + threadIdx.x / 32 * 16 * D + part;
                        for (int c = 0; c < kColumns / 16; ++c)
                          wmma::load_matrix_sync(acc[c], o + c * 16, D, wmma::mem_row_major);
                        accumulate<D, RowMajorA>(acc, sh.probability, sh.kv + part);
                        for (int c = 0; c < kColumns / 16; ++c)
                          wmma::store_matrix_sync(o + c * 16, acc[c], D, wmma::mem_row_major);
                      }
                    });
  __syncthreads();
  for (int i = threadIdx.x; i < kBlock * D; i += kThreads) {
    const int r = i / D;
    const std::int64_t token = first + r;
    if (token >= p.index.shape.q_tokens) continue;
    const float value = sh.sum[r] > 0 ? sh.o[i] / sh.sum[r] : 0.0f;
    const std::int64_t at = token * p.o_stride + head * D + i % D;
    if (p.o_fp32) {
      static_cast<float*>(p.o)[at] = value;
    } else {
      static_cast<bf16*>(p.o)[at] = bf16(value);
    }
    if (i % D == 0)
      p.lse[head * p.index.shape.q_tokens + token] =
          sh.sum[r] > 0 ? sh.top[r] + logf(sh.sum[r]) : -INFINITY;
  }
}

template <int D>
struct BackwardShared {
  bf16 q[kBlock * D], dout[kBlock * D], k[kBlock * D], v[kBlock * D];
  float s[kBlock * kBlock];
  bf16 probability[kBlock * kBlock], ds[kBlock * kBlock];
};

/// P and dS of one tile from the operands in shared memory.  `statistics`: lse2[64], delta[64] of
/// the query block.
template <int D>
__device__ void score_gradients(BackwardShared<D>& sh, const TilePair& pair,
                                const float* statistics, float scale) {
  __syncthreads();
  product_transposed<D>(sh.s, sh.q, sh.k);
  __syncthreads();
  for (int i = threadIdx.x; i < kBlock * kBlock; i += kThreads) {
    const int r = i / kBlock;
    sh.probability[i] =
        bf16(pair.allowed(r, i % kBlock) ? exp2f(sh.s[i] * scale * kLog2E - statistics[r]) : 0.0f);
  }
  __syncthreads();
  product_transposed<D>(sh.s, sh.dout, sh.v);
  __syncthreads();
  for (int i = threadIdx.x; i < kBlock * kBlock; i += kThreads) {
    sh.ds[i] =
        bf16(static_cast<float>(sh.probability[i]) * (sh.s[i] - statistics[kBlock + i / kBlock]));
  }
  __syncthreads();
}

/// Writes or adds a warp's accumulators to N * 16 columns from `column` on; `staging` holds 64 x 64
/// floats.
template <int N>
__device__ void store_gradient(Accumulator (&acc)[N], float* staging, float* out,
                               std::int64_t stride, int column, std::int64_t first,
                               std::int64_t tokens, float factor, bool add) {
#pragma unroll
  for (int begin = 0; begin < N; begin += 4) {
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (begin + c < N)
        wmma::store_matrix_sync(staging + threadIdx.x / 32 * 16 * kBlock + c * 16, acc[begin + c],
                                kBlock, wmma::mem_row_major);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kBlock * kBlock; i += kThreads) {
      const std::int64_t token = first + i / kBlock;
      if (token >= tokens || begin * 16 + i % kBlock >= N * 16) continue;
      float& to = out[token * stride + column + begin * 16 + i % kBlock];
      to = (add ? to : 0.0f) + staging[i] * factor;
    }
  }
}

/// blockIdx.z: which part_columns() columns of dQ.
template <int D>
__global__ void __launch_bounds__(kThreads) query_gradient_plain_kernel(PlainParams p) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& sh = *reinterpret_cast<BackwardShared<D>*>(raw);
  const int qb = blockIdx.x, head = blockIdx.y;
  const std::int64_t first = static_cast<std::int64_t>(qb) * kBlock;
  load_tile<D>(sh.q, p.q, first, head);
  load_tile<D>(sh.dout, p.dout, first, head);
  const int column = blockIdx.z * part_columns(D);
  Accumulator dq[part_columns(D) / 16];
  for (auto& a : dq) wmma::fill_fragment(a, 0.0f);
  const float* statistics = p.statistics + (head * p.index.shape.q_blocks() + qb) * 2 * kBlock;
  for_each_key_tile(p, qb, head,
                    [&](const TilePair& pair, const Tensor3& k, const Tensor3& v,
                        std::int64_t token, int kv_head) {
                      __syncthreads();
                      load_tile<D>(sh.k, k, token, kv_head);
                      load_tile<D>(sh.v, v, token, kv_head);
                      score_gradients<D>(sh, pair, statistics, p.scale);
                      accumulate<D, RowMajorA>(dq, sh.ds, sh.k + column);
                    });
  store_gradient(dq, sh.s, p.dq, p.dq_stride, head * D + column, first, p.index.shape.q_tokens,
                 p.scale, p.accumulate_dq);
}

/// blockIdx.x: key blocks, then groups of gathered columns; blockIdx.y: key heads (or the head of
/// the gathered buffer); blockIdx.z: which part_columns() columns of dK and dV.
template <int D>
__global__ void __launch_bounds__(kThreads) key_gradient_plain_kernel(PlainParams p) {
  extern __shared__ __align__(128) unsigned char raw[];
  auto& sh = *reinterpret_cast<BackwardShared<D>*>(raw);
  const DeviceIndex& x = p.index;
  const int column = blockIdx.z * part_columns(D);
  Accumulator dk[part_columns(D) / 16], dv[part_columns(D) / 16];
  for (auto& a : dk) wmma::fill_fragment(a, 0.0f);
  for (auto& a : dv) wmma::fill_fragment(a, 0.0f);
  const auto tile = [&](const TilePair& pair, int qb, int head) {
    __syncthreads();
    load_tile<D>(sh.q, p.q, static_cast<std::int64_t>(qb) * kBlock, head);
    load_tile<D>(sh.dout, p.dout, static_cast<std::int64_t>(qb) * kBlock, head);
    score_gradients<D>(sh, pair, p.statistics + (head * x.shape.q_blocks() + qb) * 2 * kBlock,
                       p.scale);
    accumulate<D, ColMajorA>(dv, sh.probability, sh.dout + column);
    accumulate<D, ColMajorA>(dk, sh.ds, sh.q + column);
  };
  const bool one_list = x.shape.index_heads == 1;
  const int k_blocks = static_cast<int>(x.shape.k_blocks());
  const int head_y = blockIdx.y;
  if (static_cast<int>(blockIdx.x) < k_blocks) {
    const int kb = blockIdx.x, key = kb * kBlock;
    load_tile<D>(sh.k, p.k, key, head_y);
    load_tile<D>(sh.v, p.v, key, head_y);
    for (int head = head_y * p.group; head < (head_y + 1) * p.group; ++head) {
      RunCursor cursor;
      open_key_block(cursor, x, one_list ? 0 : head, kb);
      for (; cursor.block != INT_MAX; cursor.pop()) {
        const int qb = cursor.block;
        if (visible_state(x.bounds[qb], key) == kSkip) continue;
        tile(TilePair{x.rows + static_cast<std::int64_t>(qb) * kBlock, key, false,
                      cursor.mask >= 0 ? x.row_masks[cursor.mask] : kAllRows},
             qb, head);
      }
    }
    store_gradient(dk, sh.s, p.dk, p.dk_stride, head_y * D + column, key, x.shape.k_tokens, p.scale,
                   p.accumulate_dkv);
    store_gradient(dv, sh.s, p.dv, p.dv_stride, head_y * D + column, key, x.shape.k_tokens, 1.0f,
                   p.accumulate_dkv);
    return;
  }
  if (head_y >= x.column_heads()) return;
  const int first_row = (blockIdx.x - k_blocks) * kBlock;
  if (first_row >= x.column_row_offset[x.shape.index_heads * x.shape.segments]) return;
  const int list = x.column_tile_list[first_row / kColumnTile], h = list / x.shape.segments;
  const int key = first_row - x.column_row_offset[list];
  const Interval range = x.column_tile_queries[first_row / kColumnTile];
  load_tile<D>(sh.k, p.column_k, first_row, head_y);
  load_tile<D>(sh.v, p.column_v, first_row, head_y);
  const int head0 = one_list ? head_y * p.group : h;
  for (int head = head0; head < head0 + (one_list ? p.group : 1); ++head) {
    for (int qb = range.begin; qb < range.end; ++qb) {
      if (visible_state(column_block_bounds(x, h, qb), key) == kSkip) continue;
      tile(TilePair{x.column_bounds + (h * x.shape.q_blocks() + qb) * kBlock, key, true,
                    cover_word(x, h, qb, key / kBlock)},
           qb, head);
    }
  }
  const std::int64_t stride = x.column_heads() * D;
  const int to = head_y * D + column;
  store_gradient(dk, sh.s, p.column_dk, stride, to, first_row, INT_MAX, p.scale, false);
  store_gradient(dv, sh.s, p.column_dv, stride, to, first_row, INT_MAX, 1.0f, false);
}

template <class Shared, class Kernel>
cudaError_t launch(Kernel kernel, dim3 grid, const PlainParams& p, cudaStream_t stream) {
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e != cudaSuccess) return e;
  kernel<<<grid, kThreads, sizeof(Shared), stream>>>(p);
  return cudaGetLastError();
}

template <class Args>
PlainParams common(const Args& a, const AttentionScratch& scratch) {
  PlainParams p{};
  const IndexShape& s = a.index->shape;
  const std::int64_t column_stride = a.index->column_heads() * a.head_dim;
  p.index = *a.index;
  p.q = {static_cast<const bf16*>(a.q), a.q_stride, s.q_tokens};
  p.k = {static_cast<const bf16*>(a.k), a.k_stride, s.k_tokens};
  p.v = {static_cast<const bf16*>(a.v), a.v_stride, s.k_tokens};
  p.column_k = {static_cast<const bf16*>(scratch.column_k), column_stride, a.index->column_rows()};
  p.column_v = {static_cast<const bf16*>(scratch.column_v), column_stride, a.index->column_rows()};
  p.group = a.q_heads / a.kv_heads;
  p.scale = a.scale;
  return p;
}

}  // namespace

cudaError_t forward_plain(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                          cudaStream_t stream) {
  PlainParams p = common(a, scratch);
  p.o = a.o;
  p.o_stride = a.o_stride;
  p.o_fp32 = a.o_fp32;
  p.lse = a.lse;
  const dim3 grid(static_cast<unsigned>(a.index->shape.q_blocks()), a.q_heads);
  return at_head_dim(a.head_dim, [&](auto d) {
    constexpr int D = decltype(d)::value;
    return launch<ForwardShared<D>>(forward_plain_kernel<D>, grid, p, stream);
  });
}

cudaError_t query_gradient_plain(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                                 cudaStream_t stream) {
  PlainParams p = common(a, scratch);
  p.dout = {static_cast<const bf16*>(a.dout), a.dout_stride, a.index->shape.q_tokens};
  p.statistics = scratch.statistics;
  p.dq = a.dq;
  p.dq_stride = a.dq_stride;
  p.accumulate_dq = a.accumulate_dq;
  const dim3 grid(static_cast<unsigned>(a.index->shape.q_blocks()), a.q_heads,
                  a.head_dim / part_columns(a.head_dim));
  return at_head_dim(a.head_dim, [&](auto d) {
    constexpr int D = decltype(d)::value;
    return launch<BackwardShared<D>>(query_gradient_plain_kernel<D>, grid, p, stream);
  });
}

cudaError_t backward_plain(const AttentionBackwardArgs& a, const AttentionScratch& scratch,
                           cudaStream_t stream) {
  const cudaError_t e = query_gradient_plain(a, scratch, stream);
  if (e != cudaSuccess) return e;
  PlainParams p = common(a, scratch);
  p.dout = {static_cast<const bf16*>(a.dout), a.dout_stride, a.index->shape.q_tokens};
  p.statistics = scratch.statistics;
  p.dk = a.dk;
  p.dv = a.dv;
  p.dk_stride = a.dk_stride;
  p.dv_stride = a.dv_stride;
  p.accumulate_dkv = a.accumulate_dkv;
  p.column_dk = scratch.column_dk;
  p.column_dv = scratch.column_dv;
  const dim3 grid(
      static_cast<unsigned>(a.index->shape.k_blocks() + a.index->column_rows() / kBlock),
      a.kv_heads, a.head_dim / part_columns(a.head_dim));
  return at_head_dim(a.head_dim, [&](auto d) {
    constexpr int D = decltype(d)::value;
    return launch<BackwardShared<D>>(key_gradient_plain_kernel<D>, grid, p, stream);
  });
}

}  // namespace ballast::cuda
