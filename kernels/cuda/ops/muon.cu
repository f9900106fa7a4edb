// Muon's passes over memory; its matrix products are cuBLASLt's (operations.cpp).
#include <cuda_bf16.h>

#include "kernels/cuda/ops/ops.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
unsigned blocks_for(std::int64_t n) {
  const std::int64_t blocks = (n + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > (1 << 20) ? (1 << 20) : blocks);
}
__device__ std::int64_t thread_index() {
  return blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
}
__device__ std::int64_t thread_count() { return gridDim.x * static_cast<std::int64_t>(kThreads); }

__global__ void __launch_bounds__(kThreads)
    momentum_kernel(float* moment, float* gradient, std::int64_t n, float scale, float momentum,
                    float own, float ahead) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const float g = scale * gradient[i], m = momentum * moment[i] + g;
    moment[i] = m;
    gradient[i] = own * g + ahead * m;
  }
}

__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const float* x, const double* squares, double eps, __nv_bfloat16* y,
                     std::int64_t n) {
  const auto over = static_cast<float>(1 / (sqrt(*squares) + eps));
  for (std::int64_t i = thread_index(); i < n; i += thread_count())
    y[i] = __float2bfloat16_rn(over * x[i]);
}

__global__ void __launch_bounds__(kThreads)
    update_kernel(float* master, const float* direction, __nv_bfloat16* values, std::int64_t n,
                  float step_size, float shrink) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const float w = master[i], next = w - shrink * w - step_size * direction[i];
    master[i] = next;
    values[i] = __float2bfloat16_rn(next);
  }
}

}  // namespace

cudaError_t muon_momentum(float* moment, float* gradient, std::int64_t n, float scale,
                          float momentum, float own, float ahead, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  momentum_kernel<<<blocks_for(n), kThreads, 0, stream>>>(moment, gradient, n, scale, momentum, own,
                                                          ahead);
  return cudaGetLastError();
}

cudaError_t normalise(const float* x, const double* squares, double eps, Bf16* y, std::int64_t n,
                      cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  normalise_kernel<<<blocks_for(n), kThreads, 0, stream>>>(x, squares, eps, y, n);
  return cudaGetLastError();
}

cudaError_t muon_update(float* master, const float* direction, Bf16* values, std::int64_t n,
                        float step_size, float shrink, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  update_kernel<<<blocks_for(n), kThreads, 0, stream>>>(master, direction, values, n, step_size,
                                                        shrink);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
