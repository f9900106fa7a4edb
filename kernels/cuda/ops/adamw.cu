// AdamW on a shard, and the sums that clipping and the loss need (fp64, fixed order).
#include <algorithm>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"
#include "kernels/ops/stochastic_rounding.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumBlocks = 528;
// Four a multiprocessor of an H200: with more blocks the eight streams of addresses lie further
// apart.
constexpr int kAdamWBlocks = 528;

// Four neighbours of an array of n, from element i on.  Which thread takes which elements does not
// depend on kAligned (16 bytes; bf16 8), so sums have the same bits wherever an array begins.
template <bool kAligned>
__device__ float4 load4(const float* x, std::int64_t i, std::int64_t n) {
  if constexpr (kAligned)
    if (i + 4 <= n) return *reinterpret_cast<const float4*>(x + i);
  return make_float4(x[i], i + 1 < n ? x[i + 1] : 0, i + 2 < n ? x[i + 2] : 0,
                     i + 3 < n ? x[i + 3] : 0);
}
template <bool kAligned>
__device__ float4 load4(const __nv_bfloat16* x, std::int64_t i, std::int64_t n) {
  if constexpr (kAligned)
    if (i + 4 <= n) {
      const uint2 four = *reinterpret_cast<const uint2*>(x + i);
      return make_float4(__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xffff0000u),
                         __uint_as_float(four.y << 16), __uint_as_float(four.y & 0xffff0000u));
    }
  const auto at = [&](std::int64_t j) { return j < n ? __bfloat162float(x[j]) : 0.0f; };
  return make_float4(at(i), at(i + 1), at(i + 2), at(i + 3));
}
template <bool kAligned>
__device__ void store4(float* x, std::int64_t i, std::int64_t n, float4 v) {
  if (kAligned && i + 4 <= n) {
    *reinterpret_cast<float4*>(x + i) = v;
    return;
  }
  x[i] = v.x;
  if (i + 1 < n) x[i + 1] = v.y;
  if (i + 2 < n) x[i + 2] = v.z;
  if (i + 3 < n) x[i + 3] = v.w;
}
template <bool kAligned>
__device__ void store4(__nv_bfloat16* x, std::int64_t i, std::int64_t n, float4 v) {
  if (kAligned && i + 4 <= n) {
    struct alignas(8) {
      __nv_bfloat162 low, high;
    } packed{__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
    *reinterpret_cast<uint2*>(x + i) = reinterpret_cast<const uint2&>(packed);
    return;
  }
  x[i] = __float2bfloat16_rn(v.x);
  if (i + 1 < n) x[i + 1] = __float2bfloat16_rn(v.y);
  if (i + 2 < n) x[i + 2] = __float2bfloat16_rn(v.z);
  if (i + 3 < n) x[i + 3] = __float2bfloat16_rn(v.w);
}

/// Moments of four neighbours, of which element i has number `number`: as they are, or rounded by
/// chance, by the lower half of a number's random bits (first moment) or by the upper one.
template <bool kAligned>
__device__ void store_moments(float* m, float* v, std::int64_t i, std::int64_t n, float4 first,
                              float4 second, std::int64_t, std::uint32_t) {
  store4<kAligned>(m, i, n, first);
  store4<kAligned>(v, i, n, second);
}
template <bool kAligned>
__device__ void store_rounded(__nv_bfloat16* x, std::int64_t i, std::int64_t n, float4 v,
                              const std::uint32_t (&random)[4]) {
  const std::uint16_t bits[4] = {round_by_chance(__float_as_uint(v.x), random[0]),
                                 round_by_chance(__float_as_uint(v.y), random[1]),
                                 round_by_chance(__float_as_uint(v.z), random[2]),
                                 round_by_chance(__float_as_uint(v.w), random[3])};
  if (kAligned && i + 4 <= n) {
    *reinterpret_cast<uint2*>(x + i) = make_uint2(bits[0] | static_cast<unsigned>(bits[1]) << 16,
                                                  bits[2] | static_cast<unsigned>(bits[3]) << 16);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (i + j < n) x[i + j] = __ushort_as_bfloat16(bits[j]);
}
template <bool kAligned>
__device__ void store_moments(__nv_bfloat16* m, __nv_bfloat16* v, std::int64_t i, std::int64_t n,
                              float4 first, float4 second, std::int64_t number, std::uint32_t key) {
  std::uint32_t random[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) random[j] = rounding_bits(key, number + j);
  store_rounded<kAligned>(m, i, n, first, random);
#pragma unroll
  for (int j = 0; j < 4; ++j) random[j] >>= 16;
  store_rounded<kAligned>(v, i, n, second, random);
}

__device__ void adamw(float gradient, bool decays, const AdamWFactors& f, float& w, float& m,
                      float& v) {
  const float g = gradient * f.scale;
  m = f.beta1 * m + f.rest1 * g;
  v = f.beta2 * v + f.rest2 * g * g;
  if (decays) w -= f.shrink * w;
  w -= f.step_size * m / (sqrtf(v) * f.correction + f.eps);
}

/// kVectors: of four elements, whose loads a thread has in flight together.
template <bool kAligned, int kBlock, int kVectors, class Moment, class Gradient>
__global__ void __launch_bounds__(kBlock)
    adamw_kernel(float* master, Moment* moment1, Moment* moment2, const std::int64_t* decay_bounds,
                 int bounds, const Gradient* gradient, __nv_bfloat16* values, std::int64_t n,
                 AdamWFactors f) {
  int passed = 0;  // bounds at or before element i; odd: inside a range
  const std::int64_t stride = 4 * (gridDim.x * static_cast<std::int64_t>(kBlock));
  for (std::int64_t first = 4 * (blockIdx.x * static_cast<std::int64_t>(kBlock) + threadIdx.x);
       first < n; first += kVectors * stride) {
    float4 g[kVectors], w[kVectors], m[kVectors], v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const std::int64_t i = first + k * stride;
      if (i >= n) break;
      g[k] = load4<kAligned>(gradient, i, n);
      w[k] = load4<kAligned>(master, i, n);
      m[k] = load4<kAligned>(moment1, i, n);
      v[k] = load4<kAligned>(moment2, i, n);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const std::int64_t i = first + k * stride;
      if (i >= n) break;
      bool decays[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        while (passed < bounds && decay_bounds[passed] <= i + j) ++passed;
        decays[j] = passed % 2 != 0;
      }
      adamw(g[k].x, decays[0], f, w[k].x, m[k].x, v[k].x);
      adamw(g[k].y, decays[1], f, w[k].y, m[k].y, v[k].y);
      adamw(g[k].z, decays[2], f, w[k].z, m[k].z, v[k].z);
      adamw(g[k].w, decays[3], f, w[k].w, m[k].w, v[k].w);
      store_moments<kAligned>(moment1, moment2, i, n, m[k], v[k], f.first + i, f.key);
      store4<kAligned>(master, i, n, w[k]);
      store4<kAligned>(values, i, n, w[k]);
    }
  }
}

/// What fills a multiprocessor alone, so that few of them keep memory busy beside products that
/// fill the others.
constexpr int kBesideThreads = 1024, kBesideVectors = 2;
int beside_blocks() {
  static const int blocks = [] {
    int device = 0, processors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    return std::max(1, processors / 3);
  }();
  return blocks;
}

template <bool kSquare, bool kAligned, class T>
__global__ void __launch_bounds__(kThreads)
    partial_kernel(const T* x, std::int64_t n, double* partial) {
  __shared__ double scratch[32];
  double total = 0;
  for (std::int64_t i = 4 * (blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x); i < n;
       i += 4 * (gridDim.x * static_cast<std::int64_t>(kThreads))) {
    const float4 four = load4<kAligned>(x, i, n);
    const double a = four.x, b = four.y, c = four.z, d = four.w;
    total += kSquare ? (a * a + b * b) + (c * c + d * d) : (a + b) + (c + d);
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

bool aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

template <bool kSquare, class T>
cudaError_t reduce(const T* x, std::int64_t n, double* partial, double* result,
                   cudaStream_t stream) {
  const auto kernel = aligned(x, 4 * sizeof(T)) ? partial_kernel<kSquare, true, T>
                                                : partial_kernel<kSquare, false, T>;
  kernel<<<kSumBlocks, kThreads, 0, stream>>>(x, n, partial);
  final_kernel<<<1, kThreads, 0, stream>>>(partial, result);
  return cudaGetLastError();
}

}  // namespace

template <class Moment, class Gradient>
cudaError_t adamw_step(float* master, Moment* moment1, Moment* moment2,
                       const std::int64_t* decay_bounds, int bounds, const Gradient* gradient,
                       Bf16* values, std::int64_t n, AdamWFactors factors, cudaStream_t stream,
                       bool beside) {
  if (n == 0) return cudaSuccess;
  const bool vectors = aligned(master, 16) && aligned(moment1, 4 * sizeof(Moment)) &&
                       aligned(moment2, 4 * sizeof(Moment)) &&
                       aligned(gradient, 4 * sizeof(Gradient)) && aligned(values, 8);
  const auto kernel =
      beside    ? (vectors ? adamw_kernel<true, kBesideThreads, kBesideVectors, Moment, Gradient>
                           : adamw_kernel<false, kBesideThreads, kBesideVectors, Moment, Gradient>)
      : vectors ? adamw_kernel<true, kThreads, 1, Moment, Gradient>
                : adamw_kernel<false, kThreads, 1, Moment, Gradient>;
  kernel<<<beside ? beside_blocks() : kAdamWBlocks, beside ? kBesideThreads : kThreads, 0,
           stream>>>(master, moment1, moment2, decay_bounds, bounds, gradient, values, n, factors);
  return cudaGetLastError();
}
#define BALLAST_ADAMW(Moment, Gradient)                                               \
  template cudaError_t adamw_step(float*, Moment*, Moment*, const std::int64_t*, int, \
                                  const Gradient*, Bf16*, std::int64_t, AdamWFactors, \
                                  cudaStream_t, bool)
BALLAST_ADAMW(float, float);
BALLAST_ADAMW(float, Bf16);
BALLAST_ADAMW(Bf16, float);
BALLAST_ADAMW(Bf16, Bf16);
#undef BALLAST_ADAMW

std::size_t sum_partial_doubles() { return kSumBlocks; }

template <class T>
cudaError_t sum_of_squares(const T* x, std::int64_t n, double* partial, double* result,
                           cudaStream_t stream) {
  return reduce<true>(x, n, partial, result, stream);
}
template cudaError_t sum_of_squares(const float*, std::int64_t, double*, double*, cudaStream_t);
template cudaError_t sum_of_squares(const Bf16*, std::int64_t, double*, double*, cudaStream_t);

cudaError_t sum(const float* x, std::int64_t n, double* partial, double* result,
                cudaStream_t stream) {
  return reduce<false>(x, n, partial, result, stream);
}

}  // namespace ballast::cuda
