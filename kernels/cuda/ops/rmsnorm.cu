// RMSNorm with fused residual add.  A group of threads (a warp for rows of up to 1024, at most 512
// threads) takes a row, reads it once and keeps it in registers between the two passes; a block
// holds as many groups as fit.  Where the norm feeds an FP8 product, it is rounded as it is made.
#include <algorithm>

#include "kernels/cuda/ops/fp8_tile.cuh"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kPacks = 4;  // packs of 8 values that a thread holds of a row
constexpr int kMaxGroup = 512;
constexpr int kMaxWidth = kMaxGroup * kPacks * 8;
constexpr int kRecomputeThreads = 512;
constexpr int kBackwardThreads = 512;                     // a multiprocessor
constexpr int kMaxBackwardBlocks = 2 * kMultiprocessors;  // each with a partial sum of d_weight

/// The kGroup threads of a row: a place in the group, and sums over it in a fixed order.
template <int kGroup>
struct RowGroup {
  static constexpr int kBlock = kGroup < 256 ? 256 : kGroup;  // threads a block
  static constexpr int kRows = kBlock / kGroup, kWarps = kGroup / 32;
  int lane = threadIdx.x % kGroup, index = threadIdx.x / kGroup, turn = 0;

  /// Sum over the group, on each of its threads; the whole block calls it.  `scratch` holds two
  /// values a warp of the block; the halves alternate, so that one barrier a sum is enough.
  __device__ float sum(float x, float (&scratch)[2][kBlock / 32]) {
    x = warp_sum(x);
    if constexpr (kWarps > 1) {
      float* half = scratch[turn];
      turn ^= 1;
      if (threadIdx.x % 32 == 0) half[threadIdx.x / 32] = x;
      __syncthreads();
      x = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x += half[index * kWarps + w];
    }
    return x;
  }
};

/// The norm of eight values; forward, recomputation and rounding agree bit for bit by it.
__device__ Pack8 normed(const Pack8& x, const Pack8& weight, float scale) {
  float v[8], w[8];
  unpack(x, v);
  unpack(weight, w);
#pragma unroll
  for (int j = 0; j < 8; ++j) w[j] *= v[j] * scale;
  return pack(w);
}

// With kRounded y is rounded to `to` in place of being written.
template <int kGroup, bool kResidual, bool kRounded>
__global__ void __launch_bounds__(RowGroup<kGroup>::kBlock, 1024 / RowGroup<kGroup>::kBlock)
    forward_kernel(const Pack8* x, const Pack8* residual, const Pack8* weight, float eps,
                   Pack8* sum, Pack8* y, Fp8Target to, float* rstd, std::int64_t rows,
                   int row_packs) {
  await_earlier_work();
  __shared__ float scratch[2][RowGroup<kGroup>::kBlock / 32];
  RowGroup<kGroup> group;
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(group.kRows) + group.index;
  const int packs = row < rows ? row_packs : 0;  // the last block's other groups only join in
  Pack8 f[kPacks], r[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = group.lane + k * kGroup;
    if (i < packs) {
      f[k] = x[row * packs + i];
      if constexpr (kResidual) r[k] = residual[row * packs + i];
    }
  }
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = group.lane + k * kGroup;
    if (i < packs) {
      float v[8];
      unpack(f[k], v);
      if constexpr (kResidual) {
        float b[8];
        unpack(r[k], b);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += b[j];
        f[k] = pack(v);  // the norm sees what backward will read
        sum[row * packs + i] = f[k];
        unpack(f[k], v);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
    }
  }
  const float scale = rsqrtf(group.sum(squares, scratch) / (8.0f * row_packs) + eps);
  const int padded_packs = row < to.rows_padded ? row_packs : 0;
  if (group.lane == 0 && packs > 0) rstd[row] = scale;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int i = group.lane + k * kGroup;
    Pack8 made{};
    if (i < packs) made = normed(f[k], weight[i], scale);
    if constexpr (kRounded)
      store_block(made, i < padded_packs, row, i, to);
    else if (i < packs)
      y[row * packs + i] = made;
  }
}

// y again from the kept rstd.
__global__ void __launch_bounds__(kRecomputeThreads)
    recompute_kernel(const Pack8* x, const float* rstd, const Pack8* weight, Pack8* y,
                     std::int64_t n, int packs) {
  await_earlier_work();
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kRecomputeThreads) + threadIdx.x;
  if (i >= n) return;
  const std::int64_t row = i / packs;
  y[i] = normed(x[i], weight[i - row * packs], rstd[row]);
}

__global__ void __launch_bounds__(kThreads, 4)
    rounded_recompute_kernel(const Pack8* x, const float* rstd, const Pack8* weight, Fp8Target to) {
  await_earlier_work();
  __shared__ TileExchange exchange;
  const TilePlace at(blockIdx.x, blockIdx.y);
  const std::int64_t packs = to.width / kColumns, own = at.column0 / kColumns;
  Pack8 w{};
  if (own < packs) w = weight[own];
  const Tile t = load_tile(at, to.rows, to.width, [=](std::int64_t row, std::int64_t) {
    return normed(x[row * packs + own], w, rstd[row]);
  });
  store_columns(t, at, to, exchange);
}

// d_x = rstd (w d_y - x_hat mean(w d_y x_hat)), x_hat = x rstd; added to d_x with kAdd.
// With kWeight, partial [block, 8 packs] = sum of d_y x_hat over this block's rows: every group
// adds up its own rows in ascending order, then the groups add to each other in order.
template <int kGroup, bool kAdd, bool kWeight>
__global__ void __launch_bounds__(RowGroup<kGroup>::kBlock,
                                  kBackwardThreads / RowGroup<kGroup>::kBlock)
    backward_kernel(const Pack8* x, const Pack8* weight, const float* rstd, const Pack8* d_y,
                    Pack8* d_x, float* partial, std::int64_t rows, int row_packs) {
  await_earlier_work();
  __shared__ float scratch[2][RowGroup<kGroup>::kBlock / 32];
  RowGroup<kGroup> group;
  float d_weight[kPacks][8] = {};
  for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(group.kRows); first < rows;
       first += static_cast<std::int64_t>(gridDim.x) * group.kRows) {
    const std::int64_t row = first + group.index;
    const int packs = row < rows ? row_packs : 0;  // groups past the end only join in

    Pack8 f[kPacks], g[kPacks], r[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = group.lane + k * kGroup;
      if (i < packs) {
        f[k] = x[row * packs + i];
        g[k] = d_y[row * packs + i];
        if constexpr (kAdd) r[k] = d_x[row * packs + i];
      }
    }
    const float scale = packs > 0 ? rstd[row] : 0.0f;
    float dot = 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = group.lane + k * kGroup;
      if (i < packs) {
        float a[8], b[8], c[8];
        unpack(f[k], a);
        unpack(g[k], b);
        unpack(weight[i], c);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          dot += b[j] * c[j] * a[j];
          if constexpr (kWeight) d_weight[k][j] += b[j] * a[j] * scale;
        }
      }
    }
    const float mean = group.sum(dot, scratch) * scale * scale / (8.0f * row_packs);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int i = group.lane + k * kGroup;
      if (i < packs) {
        float a[8], b[8], c[8], out[8] = {};
        unpack(f[k], a);
        unpack(g[k], b);
        unpack(weight[i], c);
        if constexpr (kAdd) unpack(r[k], out);
#pragma unroll
        for (int j = 0; j < 8; ++j) out[j] += scale * (b[j] * c[j] - a[j] * mean);
        d_x[row * packs + i] = pack(out);
      }
    }
  }
  if constexpr (kWeight) {
    __shared__ float sums[group.kRows > 1 ? kGroup * kPacks * 8 : 1];
    float* out = partial + static_cast<std::int64_t>(blockIdx.x) * row_packs * 8;
    for (int turn = 0; turn < group.kRows; ++turn) {
      if (group.index == turn) {
        const bool last = turn == group.kRows - 1;
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          const int i = group.lane + k * kGroup;
          if (i >= row_packs) continue;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            // Neighbouring lanes in neighbouring banks.
            const int at = (k * 8 + j) * kGroup + group.lane;
            const float total = d_weight[k][j] + (turn > 0 ? sums[at] : 0.0f);
            if (last)
              out[i * 8 + j] = total;
            else
              sums[at] = total;
          }
        }
      }
      if (group.kRows > 1) __syncthreads();
    }
  }
}

/// Calls f with the group size for rows of `packs` packs as a constant.
template <class F>
void with_group(int packs, F&& f) {
  if (packs <= 32 * kPacks)
    f(std::integral_constant<int, 32>());
  else if (packs <= 64 * kPacks)
    f(std::integral_constant<int, 64>());
  else if (packs <= 128 * kPacks)
    f(std::integral_constant<int, 128>());
  else if (packs <= 256 * kPacks)
    f(std::integral_constant<int, 256>());
  else
    f(std::integral_constant<int, 512>());
}

bool fits(int width) { return width > 0 && width % 8 == 0 && width <= kMaxWidth; }
const Pack8* packs_of(const Bf16* p) { return reinterpret_cast<const Pack8*>(p); }
Pack8* packs_of(Bf16* p) { return reinterpret_cast<Pack8*>(p); }

template <bool kRounded>
cudaError_t forward(const Bf16* x, const Bf16* residual, const Bf16* weight, double eps, Bf16* sum,
                    Bf16* y, const Fp8Target& to, float* rstd, std::int64_t rows, int width,
                    cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (!fits(width)) return cudaErrorInvalidValue;
  with_group(width / 8, [&](auto size) {
    constexpr int kGroup = decltype(size)::value, kEach = RowGroup<kGroup>::kRows;
    const auto kernel = residual != nullptr ? forward_kernel<kGroup, true, kRounded>
                                            : forward_kernel<kGroup, false, kRounded>;
    const std::int64_t all = kRounded ? to.rows_padded : rows;
    launch(kernel, static_cast<unsigned>((all + kEach - 1) / kEach), RowGroup<kGroup>::kBlock, 0,
           stream, packs_of(x), packs_of(residual), packs_of(weight), static_cast<float>(eps),
           packs_of(sum), packs_of(y), to, rstd, rows, width / 8);
  });
  return cudaGetLastError();
}

}  // namespace

cudaError_t rmsnorm_forward(const Bf16* x, const Bf16* residual, const Bf16* weight, double eps,
                            Bf16* sum, Bf16* y, float* rstd, std::int64_t rows, int width,
                            cudaStream_t stream) {
  return forward<false>(x, residual, weight, eps, sum, y, {}, rstd, rows, width, stream);
}

cudaError_t fp8_rmsnorm(const Bf16* x, const Bf16* residual, const Bf16* weight, double eps,
                        Bf16* sum, float* rstd, const Fp8Target& to, cudaStream_t stream) {
  return forward<true>(x, residual, weight, eps, sum, nullptr, to, rstd, to.rows,
                       static_cast<int>(to.width), stream);
}

cudaError_t fp8_rmsnorm_recompute(const Bf16* x, const float* rstd, const Bf16* weight,
                                  const Fp8Target& to, cudaStream_t stream) {
  if (to.rows == 0) return cudaSuccess;
  if (to.width % 8 != 0) return cudaErrorInvalidValue;
  launch(rounded_recompute_kernel, dim3(tiles(to.width), tiles(to.rows)), kThreads, 0, stream,
         packs_of(x), rstd, packs_of(weight), to);
  return cudaGetLastError();
}

cudaError_t rmsnorm_recompute(const Bf16* x, const float* rstd, const Bf16* weight, Bf16* y,
                              std::int64_t rows, int width, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  const std::int64_t n = rows * (width / 8);
  launch(recompute_kernel, static_cast<unsigned>((n + kRecomputeThreads - 1) / kRecomputeThreads),
         kRecomputeThreads, 0, stream, packs_of(x), rstd, packs_of(weight), packs_of(y), n,
         width / 8);
  return cudaGetLastError();
}

std::size_t rmsnorm_partial_floats(int width) {
  return static_cast<std::size_t>(kMaxBackwardBlocks) * width;
}

cudaError_t rmsnorm_backward(const Bf16* x, const Bf16* weight, const float* rstd, const Bf16* d_y,
                             bool accumulate_x, Bf16* d_x, const GradientOut& d_weight,
                             float* partial, std::int64_t rows, int width, cudaStream_t stream) {
  if (!fits(width)) return cudaErrorInvalidValue;
  int blocks = 0;  // without rows the partial sums are none
  if (rows > 0)
    with_group(width / 8, [&](auto size) {
      constexpr int kGroup = decltype(size)::value;
      constexpr std::int64_t kRows = RowGroup<kGroup>::kRows;
      const auto kernel = accumulate_x
                              ? (d_weight.at != nullptr ? backward_kernel<kGroup, true, true>
                                                        : backward_kernel<kGroup, true, false>)
                              : (d_weight.at != nullptr ? backward_kernel<kGroup, false, true>
                                                        : backward_kernel<kGroup, false, false>);
      blocks = static_cast<int>(
          std::min<std::int64_t>(kMultiprocessors * (kBackwardThreads / RowGroup<kGroup>::kBlock),
                                 (rows + kRows - 1) / kRows));
      // Not by `launch`: as many blocks as places have to lie evenly over the processors.
      kernel<<<static_cast<unsigned>(blocks), RowGroup<kGroup>::kBlock, 0, stream>>>(
          packs_of(x), packs_of(weight), rstd, packs_of(d_y), packs_of(d_x), partial, rows,
          width / 8);
    });
  if (d_weight.at == nullptr) return cudaGetLastError();
  return add_partials(partial, d_weight, width, blocks, stream);
}

}  // namespace ballast::cuda
