// Warp and block reductions with a fixed order of additions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace ballast::cuda {

template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

/// Sum over the block, on every thread.  `scratch` holds one value a warp (at most 32); callers may
/// reuse it at once.
template <class T>
__device__ inline T block_sum(T x, T* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  T total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) total += scratch[w];
  return total;
}
__device__ inline float block_max(float x, float* scratch) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float best = scratch[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) best = fmaxf(best, scratch[w]);
  return best;
}

/// Eight values in two accesses; `from` lies at a multiple of 16 bytes.
__device__ inline void load_eight(const float* from, float (&to)[8]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0],
               b = reinterpret_cast<const float4*>(from)[1];
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

/// Eight bf16 values as one 16-byte access.
struct alignas(16) Pack8 {
  __nv_bfloat162 v[4];
};
__device__ inline void unpack(const Pack8& p, float (&f)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 t = __bfloat1622float2(p.v[i]);
    f[2 * i] = t.x;
    f[2 * i + 1] = t.y;
  }
}
__device__ inline Pack8 pack(const float (&f)[8]) {
  Pack8 p;
#pragma unroll
  for (int i = 0; i < 4; ++i) p.v[i] = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
  return p;
}

}  // namespace ballast::cuda
