// Cross-entropy over one chunk of logits: one block a row, online maximum and sum; then the
// gradient in place.
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 512;

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Running maximum, in units of log2, and sum of powers of two relative to it.  A NaN turns the sum
// into NaN; infinities below are nothing.
struct OnlineSum {
  float best, total;
  /// What exponents are relative to: finite where no value has been seen.
  __device__ static float shift(float best) { return best == -INFINITY ? 0.0f : best; }
  __device__ void take(float v) {
    const float higher = fmaxf(best, v * kLog2E), from = shift(higher);
    total = total * exp2_fast(best - from) + exp2_fast(v * kLog2E - from);
    best = higher;
  }
  __device__ void take(const float (&f)[8]) {
    float top = f[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) top = fmaxf(top, f[j]);
    const float higher = fmaxf(best, top * kLog2E), from = shift(higher);
    total *= exp2_fast(best - from);
    best = higher;
#pragma unroll
    for (int j = 0; j < 8; ++j) total += exp2_fast(fmaf(f[j], kLog2E, -from));
  }
  /// The block's, on every thread.
  __device__ void reduce(float* scratch) {
    const float highest = block_max(best, scratch);
    total = block_sum(total * exp2_fast(best - shift(highest)), scratch);
    best = highest;
  }
  __device__ float lse() const { return kLn2 * best + logf(total); }
};

__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __nv_bfloat16* logits, const std::int32_t* targets, float* loss,
                   float* lse, std::int64_t vocabulary) {
  __shared__ float scratch[32];
  const std::int64_t row = blockIdx.x;
  const std::int32_t target = targets[row];
  const __nv_bfloat16* x = logits + row * vocabulary;
  if (target < 0) {
    if (threadIdx.x == 0) loss[row] = 0, lse[row] = 0;
    return;
  }
  OnlineSum sum{-INFINITY, 0};
  if (vocabulary % 8 == 0) {
    for (std::int64_t i = threadIdx.x; i < vocabulary / 8; i += kThreads) {
      float f[8];
      unpack(reinterpret_cast<const Pack8*>(x)[i], f);
      sum.take(f);
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < vocabulary; i += kThreads)
      sum.take(__bfloat162float(x[i]));
  }
  sum.reduce(scratch);
  const float row_lse = sum.lse();
  if (threadIdx.x == 0) {
    lse[row] = row_lse;
    loss[row] = row_lse - __bfloat162float(x[target]);
  }
}

__global__ void __launch_bounds__(kThreads)
    correct_kernel(const __nv_bfloat16* logits, const std::int32_t* targets, std::uint8_t* correct,
                   std::int64_t vocabulary) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t target = targets[row];  // the same for the whole block
  if (target < 0) {
    if (threadIdx.x == 0) correct[row] = 0;
    return;
  }
  const __nv_bfloat16* x = logits + row * vocabulary;
  const float own = __bfloat162float(x[target]);
  bool best = own == own;
  const auto look = [&](float v, std::int64_t column) {
    best = best && (column <= target ? v < own || column == target : v <= own);
  };
  if (vocabulary % 8 == 0) {
    for (std::int64_t i = threadIdx.x; i < vocabulary / 8; i += kThreads) {
      float f[8];
      unpack(reinterpret_cast<const Pack8*>(x)[i], f);
#pragma unroll
      for (int j = 0; j < 8; ++j) look(f[j], 8 * i + j);
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < vocabulary; i += kThreads)
      look(__bfloat162float(x[i]), i);
  }
  const int all = __syncthreads_and(best);
  if (threadIdx.x == 0) correct[row] = static_cast<std::uint8_t>(all != 0);
}

__global__ void __launch_bounds__(kThreads)
    gradient_kernel(__nv_bfloat16* logits, const std::int32_t* targets, const float* lse,
                    float scale, const float* weights, std::int64_t vocabulary) {
  const std::int64_t row = blockIdx.x;
  const std::int32_t target = targets[row];
  __nv_bfloat16* x = logits + row * vocabulary;
  const float offset = lse[row];
  const float factor = target < 0 ? 0.0f : weights ? scale * weights[row] : scale;
  const auto gradient = [&](float v, std::int64_t column) {
    return target < 0 ? 0.0f : factor * (__expf(v - offset) - (column == target ? 1.0f : 0.0f));
  };
  if (vocabulary % 8 == 0) {
    for (std::int64_t i = threadIdx.x; i < vocabulary / 8; i += kThreads) {
      float f[8];
      unpack(reinterpret_cast<Pack8*>(x)[i], f);
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] = gradient(f[j], 8 * i + j);
      reinterpret_cast<Pack8*>(x)[i] = pack(f);
    }
  } else {
    for (std::int64_t i = threadIdx.x; i < vocabulary; i += kThreads)
      x[i] = __float2bfloat16_rn(gradient(__bfloat162float(x[i]), i));
  }
}

}  // namespace

cudaError_t cross_entropy_forward(const Bf16* logits, const std::int32_t* targets, float* loss,
                                  float* lse, std::int64_t rows, std::int64_t vocabulary,
                                  cudaStream_t stream) {
  if (rows > 0)
    forward_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(logits, targets, loss, lse,
                                                                         vocabulary);
  return cudaGetLastError();
}

cudaError_t cross_entropy_correct(const Bf16* logits, const std::int32_t* targets,
                                  std::uint8_t* correct, std::int64_t rows, std::int64_t vocabulary,
                                  cudaStream_t stream) {
  if (rows > 0)
    correct_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(logits, targets, correct,
                                                                         vocabulary);
  return cudaGetLastError();
}

cudaError_t cross_entropy_with_gradient(Bf16* logits, const std::int32_t* targets, float* loss,
                                        float* lse, float scale, const float* weights,
                                        std::int64_t rows, std::int64_t vocabulary,
                                        cudaStream_t stream) {
  const cudaError_t e = cross_entropy_forward(logits, targets, loss, lse, rows, vocabulary, stream);
  if (e != cudaSuccess || rows == 0) return e;
  gradient_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(logits, targets, lse, scale,
                                                                        weights, vocabulary);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
