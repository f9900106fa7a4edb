// AdamW on a shard, and the sums that clipping and the loss need (fp64, fixed order).
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumBlocks = 528;

__global__ void adamw_kernel(float* master, float* moment1, float* moment2,
                             const std::uint8_t* decay, const float* gradient,
                             __nv_bfloat16* values, std::int64_t n, AdamWScalars s) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < n;
       i += gridDim.x * static_cast<std::int64_t>(kThreads)) {
    const float g = gradient[i] * s.gradient_scale;
    const float m = s.beta1 * moment1[i] + (1 - s.beta1) * g;
    const float v = s.beta2 * moment2[i] + (1 - s.beta2) * g * g;
    float w = master[i];
    if (decay[i]) w -= s.learning_rate * s.weight_decay * w;
    w -= s.learning_rate * (m / s.correction1) / (sqrtf(v / s.correction2) + s.eps);
    moment1[i] = m;
    moment2[i] = v;
    master[i] = w;
    values[i] = __float2bfloat16_rn(w);
  }
}

template <bool kSquare>
__global__ void __launch_bounds__(kThreads)
    partial_kernel(const float* x, std::int64_t n, double* partial) {
  __shared__ double scratch[32];
  double total = 0;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < n;
       i += gridDim.x * static_cast<std::int64_t>(kThreads)) {
    const double v = x[i];
    total += kSquare ? v * v : v;
  }
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads) final_kernel(const double* partial, double* result) {
  __shared__ double scratch[32];
  double total = 0;
  for (int i = threadIdx.x; i < kSumBlocks; i += kThreads) total += partial[i];
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) *result = total;
}

}  // namespace

cudaError_t adamw_step(float* master, float* moment1, float* moment2, const std::uint8_t* decay,
                       const float* gradient, Bf16* values, std::int64_t n, AdamWScalars scalars,
                       cudaStream_t stream) {
  if (n > 0)
    adamw_kernel<<<2112, kThreads, 0, stream>>>(master, moment1, moment2, decay, gradient, values,
                                                n, scalars);
  return cudaGetLastError();
}

std::size_t sum_partial_doubles() { return kSumBlocks; }

cudaError_t sum_of_squares(const float* x, std::int64_t n, double* partial, double* result,
                           cudaStream_t stream) {
  partial_kernel<true><<<kSumBlocks, kThreads, 0, stream>>>(x, n, partial);
  final_kernel<<<1, kThreads, 0, stream>>>(partial, result);
  return cudaGetLastError();
}

cudaError_t sum(const float* x, std::int64_t n, double* partial, double* result,
                cudaStream_t stream) {
  partial_kernel<false><<<kSumBlocks, kThreads, 0, stream>>>(x, n, partial);
  final_kernel<<<1, kThreads, 0, stream>>>(partial, result);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
