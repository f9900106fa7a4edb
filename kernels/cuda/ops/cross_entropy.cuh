// What the cross-entropy kernels share: an online maximum and sum, and the choice of the kernel
// that holds a row in the registers of a cluster.
#pragma once
#include <cstdint>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Running maximum, in units of log2, and sum of powers of two relative to it.  A NaN turns the sum
/// into NaN; infinities below are nothing.
struct OnlineSum {
  float best = -INFINITY, total = 0;
  /// What exponents are relative to: finite where no value has been seen.
  __device__ static float shift(float best) { return best == -INFINITY ? 0.0f : best; }
  __device__ void take(float v) {
    const float higher = fmaxf(best, v * kLog2E);
    total = total * exp2_approx(best - shift(higher)) + exp2_approx(v * kLog2E - shift(higher));
    best = higher;
  }
  __device__ void take(const float (&f)[8]) {
    float top = f[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) top = fmaxf(top, f[j]);
    const float higher = fmaxf(best, top * kLog2E), from = shift(higher);
    total *= exp2_approx(best - from);
    best = higher;
#pragma unroll
    for (int j = 0; j < 8; ++j) total += exp2_approx(fmaf(f[j], kLog2E, -from));
  }
  /// Its sum relative to another maximum, at least its own.
  __device__ float under(float highest) const { return total * exp2_approx(best - shift(highest)); }
  /// The block's, on every thread.
  __device__ void reduce(float* scratch) {
    const float highest = block_max(best, scratch);
    total = block_sum(under(highest), scratch);
    best = highest;
  }
  __device__ float lse() const { return kLn2 * best + logf(total); }
};

inline constexpr int kClusterThreads = 512,
                     kMaxCluster = 8;   ///< 8: what every GPU with clusters has
inline constexpr int kHeldVectors = 8;  ///< of eight logits, a thread

/// Whether the current GPU has clusters and one holds a row.
inline bool cluster_fits(std::int64_t vocabulary) {
  int device = 0, major = 0;
  return vocabulary % 8 == 0 &&
         vocabulary <= std::int64_t{8} * kClusterThreads * kHeldVectors * kMaxCluster &&
         cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}
/// Loss and lse of every row and, unless null, its gradient over the logits (cross_entropy_forward
/// and cross_entropy_with_gradient): logits are read once and written once.
cudaError_t cross_entropy_sm90(const Bf16* logits, Bf16* gradient, const std::int32_t* targets,
                               float* loss, float* lse, float scale, const float* weights,
                               std::int64_t rows, std::int64_t vocabulary, cudaStream_t stream);

}  // namespace ballast::cuda
