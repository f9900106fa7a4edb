// RMSNorm with fused residual add.  One block a row; a row is read once and kept in registers
// between the two passes.
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxPacks = 8;  // 8 packs of 8 values a thread: rows up to 16384
constexpr int kWeightBlocks =
    264;  // partial sums of d_weight: two blocks a multiprocessor of an H200

__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Pack8* x, const Pack8* residual, const Pack8* weight, float eps,
                   Pack8* sum, Pack8* y, float* rstd, int packs) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  float f[kMaxPacks][8];
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kMaxPacks; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < packs) {
      unpack(x[row * packs + i], f[k]);
      if (residual) {
        float r[8];
        unpack(residual[row * packs + i], r);
#pragma unroll
        for (int j = 0; j < 8; ++j) f[k][j] += r[j];
        const Pack8 rounded = pack(f[k]);  // the norm sees what backward will read
        sum[row * packs + i] = rounded;
        unpack(rounded, f[k]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += f[k][j] * f[k][j];
    }
  }
  const float scale = rsqrtf(block_sum(squares, scratch) / (8.0f * packs) + eps);
  if (threadIdx.x == 0) rstd[row] = scale;
#pragma unroll
  for (int k = 0; k < kMaxPacks; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < packs) {
      float w[8];
      unpack(weight[i], w);
#pragma unroll
      for (int j = 0; j < 8; ++j) w[j] *= f[k][j] * scale;
      y[row * packs + i] = pack(w);
    }
  }
}

// d_x = rstd (w d_y - x_hat mean(w d_y x_hat)), x_hat = x rstd; added to d_x when `accumulate`.
__global__ void __launch_bounds__(kThreads)
    input_gradient_kernel(const Pack8* x, const Pack8* weight, const float* rstd, const Pack8* d_y,
                          bool accumulate, Pack8* d_x, int packs) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const float scale = rstd[row];
  float f[kMaxPacks][8], g[kMaxPacks][8];
  float dot = 0;
#pragma unroll
  for (int k = 0; k < kMaxPacks; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < packs) {
      float w[8];
      unpack(x[row * packs + i], f[k]);
      unpack(d_y[row * packs + i], g[k]);
      unpack(weight[i], w);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        g[k][j] *= w[j];
        dot += g[k][j] * f[k][j];
      }
    }
  }
  const float mean = block_sum(dot, scratch) * scale * scale / (8.0f * packs);
#pragma unroll
  for (int k = 0; k < kMaxPacks; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < packs) {
      float r[8] = {};
      if (accumulate) unpack(d_x[row * packs + i], r);
#pragma unroll
      for (int j = 0; j < 8; ++j) r[j] += scale * (g[k][j] - f[k][j] * mean);
      d_x[row * packs + i] = pack(r);
    }
  }
}

// d_weight = sum over rows of d_y x_hat.  Block b takes rows b, b + grid, ... in order; the partial
// sums are added in block order.
__global__ void __launch_bounds__(kThreads)
    weight_gradient_kernel(const Pack8* x, const float* rstd, const Pack8* d_y, float* partial,
                           std::int64_t rows, int packs) {
  float d_weight[kMaxPacks][8] = {};
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float scale = rstd[row];
#pragma unroll
    for (int k = 0; k < kMaxPacks; ++k) {
      const int i = threadIdx.x + k * kThreads;
      if (i < packs) {
        float f[8], g[8];
        unpack(x[row * packs + i], f);
        unpack(d_y[row * packs + i], g);
#pragma unroll
        for (int j = 0; j < 8; ++j) d_weight[k][j] += g[j] * f[j] * scale;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kMaxPacks; ++k) {
    const int i = threadIdx.x + k * kThreads;
    if (i < packs)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        partial[(static_cast<std::int64_t>(blockIdx.x) * packs + i) * 8 + j] = d_weight[k][j];
  }
}

// y again from the kept rstd: the same arithmetic as forward_kernel's second pass.
__global__ void __launch_bounds__(kThreads)
    recompute_kernel(const Pack8* x, const float* rstd, const Pack8* weight, Pack8* y, int packs) {
  const std::int64_t row = blockIdx.x;
  const float scale = rstd[row];
  for (int i = threadIdx.x; i < packs; i += kThreads) {
    float f[8], w[8];
    unpack(x[row * packs + i], f);
    unpack(weight[i], w);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] *= f[j] * scale;
    y[row * packs + i] = pack(w);
  }
}

__global__ void add_partials_kernel(const float* partial, float* out, std::int64_t columns,
                                    int parts) {
  const std::int64_t c = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (c >= columns) return;
  float total = 0;
  for (int p = 0; p < parts; ++p) total += partial[p * columns + c];
  out[c] += total;
}

constexpr int kBiasRows = 128;  // row groups of bias_gradient

__global__ void bias_kernel(const __nv_bfloat16* d_y, std::int64_t stride, float* partial,
                            std::int64_t rows, std::int64_t columns) {
  const std::int64_t c = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (c >= columns) return;
  float total = 0;
  for (std::int64_t r = blockIdx.y; r < rows; r += kBiasRows)
    total += __bfloat162float(d_y[r * stride + c]);
  partial[blockIdx.y * columns + c] = total;
}

}  // namespace

cudaError_t rmsnorm_forward(const Bf16* x, const Bf16* residual, const Bf16* weight, double eps,
                            Bf16* sum, Bf16* y, float* rstd, std::int64_t rows, int width,
                            cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0 || width > kThreads * kMaxPacks * 8) return cudaErrorInvalidValue;
  auto p = [](const Bf16* q) { return reinterpret_cast<const Pack8*>(q); };
  forward_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      p(x), p(residual), p(weight), static_cast<float>(eps), reinterpret_cast<Pack8*>(sum),
      reinterpret_cast<Pack8*>(y), rstd, width / 8);
  return cudaGetLastError();
}

std::size_t rmsnorm_partial_floats(int width) {
  return static_cast<std::size_t>(kWeightBlocks) * width;
}

cudaError_t rmsnorm_recompute(const Bf16* x, const float* rstd, const Bf16* weight, Bf16* y,
                              std::int64_t rows, int width, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  recompute_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      reinterpret_cast<const Pack8*>(x), rstd, reinterpret_cast<const Pack8*>(weight),
      reinterpret_cast<Pack8*>(y), width / 8);
  return cudaGetLastError();
}

cudaError_t rmsnorm_input_gradient(const Bf16* x, const Bf16* weight, const float* rstd,
                                   const Bf16* d_y, bool accumulate, Bf16* d_x, std::int64_t rows,
                                   int width, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0 || width > kThreads * kMaxPacks * 8) return cudaErrorInvalidValue;
  auto p = [](const Bf16* q) { return reinterpret_cast<const Pack8*>(q); };
  input_gradient_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      p(x), p(weight), rstd, p(d_y), accumulate, reinterpret_cast<Pack8*>(d_x), width / 8);
  return cudaGetLastError();
}

cudaError_t rmsnorm_weight_gradient(const Bf16* x, const float* rstd, const Bf16* d_y,
                                    float* d_weight, float* partial, std::int64_t rows, int width,
                                    cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0 || width > kThreads * kMaxPacks * 8) return cudaErrorInvalidValue;
  const int blocks = rows < kWeightBlocks ? static_cast<int>(rows) : kWeightBlocks;
  weight_gradient_kernel<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const Pack8*>(x), rstd,
                                                          reinterpret_cast<const Pack8*>(d_y),
                                                          partial, rows, width / 8);
  add_partials_kernel<<<(width + 127) / 128, 128, 0, stream>>>(partial, d_weight, width, blocks);
  return cudaGetLastError();
}

std::size_t bias_partial_floats(std::int64_t columns) {
  return static_cast<std::size_t>(kBiasRows) * columns;
}

cudaError_t bias_gradient(const Bf16* d_y, std::int64_t row_stride, float* d_bias, float* partial,
                          std::int64_t rows, std::int64_t columns, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((columns + 127) / 128), kBiasRows);
  bias_kernel<<<grid, 128, 0, stream>>>(d_y, row_stride, partial, rows, columns);
  add_partials_kernel<<<grid.x, 128, 0, stream>>>(partial, d_bias, columns, kBiasRows);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
