// delta = rowsum(dout * o), which attention's backward needs of every query row and head.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace ballast::cuda {

/// Query rows that a warp takes together, of one head: what it writes of them is one sector.
constexpr int kDeltaRows = 8;

/// Eight neighbours of a row, as they lie in memory.
struct EightBf16 {
  uint4 raw = {};
  __device__ void load(const __nv_bfloat16* p) { raw = *reinterpret_cast<const uint4*>(p); }
  __device__ void read(float (&x)[8]) const {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
};
struct EightFloats {
  float4 raw[2] = {};
  __device__ void load(const float* p) {
    raw[0] = *reinterpret_cast<const float4*>(p);
    raw[1] = *reinterpret_cast<const float4*>(p + 4);
  }
  __device__ void read(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = raw[i].x, x[4 * i + 1] = raw[i].y;
      x[4 * i + 2] = raw[i].z, x[4 * i + 3] = raw[i].w;
    }
  }
};

struct DeltaOperands {
  const __nv_bfloat16* dout;
  const void* o;  ///< bf16 or fp32
  std::int64_t dout_stride, o_stride, tokens;
  int head_dim;
  bool o_fp32, vector;  ///< vector: all rows are aligned to 16 bytes

  /// By a warp: lane r < kDeltaRows gets delta of row `token` + r, 0 from `tokens` on.  kLanes read
  /// a row, eight elements each: 8 kLanes >= head_dim.
  template <int kLanes>
  __device__ float rows(std::int64_t token, int head) const {
    const auto* fp32 = static_cast<const float*>(o);
    const auto* bf16 = static_cast<const __nv_bfloat16*>(o);
    if (!vector) return o_fp32 ? by_elements(fp32, token, head) : by_elements(bf16, token, head);
    return o_fp32 ? by_eights<kLanes, EightFloats>(fp32, token, head)
                  : by_eights<kLanes, EightBf16>(bf16, token, head);
  }

 private:
  template <int kLanes, class Eight, class T>
  __device__ float by_eights(const T* out, std::int64_t token, int head) const {
    constexpr int kTogether = 32 / kLanes, kPasses = kDeltaRows / kTogether;
    const int lane = threadIdx.x % 32, d = lane % kLanes * 8;
    EightBf16 a[kPasses];  // loaded first, so that all are on their way at once
    Eight b[kPasses];
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      const std::int64_t row = token + p * kTogether + lane / kLanes;
      if (row >= tokens || d >= head_dim) continue;
      a[p].load(dout + row * dout_stride + head * head_dim + d);
      b[p].load(out + row * o_stride + head * head_dim + d);
    }
    float mine = 0;
#pragma unroll
    for (int p = 0; p < kPasses; ++p) {
      float x[8], y[8], sum = 0;
      a[p].read(x);
      b[p].read(y);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const float of_row = __shfl_sync(~0u, sum, lane % kTogether * kLanes);
      if (lane / kTogether == p) mine = of_row;
    }
    return mine;
  }
  template <class T>
  __device__ float by_elements(const T* out, std::int64_t token, int head) const {
    const int lane = threadIdx.x % 32;
    float mine = 0;
    for (int r = 0; r < kDeltaRows && token + r < tokens; ++r) {
      const __nv_bfloat16* a = dout + (token + r) * dout_stride + head * head_dim;
      const T* b = out + (token + r) * o_stride + head * head_dim;
      float sum = 0;
      for (int d = lane; d < head_dim; d += 32)
        sum += static_cast<float>(a[d]) * static_cast<float>(b[d]);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == r) mine = sum;
    }
    return mine;
  }
};

/// f(lanes) with the lanes that read a row as a constant of the compiler.
template <class F>
void at_row_lanes(int head_dim, F f) {
  if (head_dim <= 64)
    f(std::integral_constant<int, 8>());
  else if (head_dim <= 128)
    f(std::integral_constant<int, 16>());
  else
    f(std::integral_constant<int, 32>());
}

}  // namespace ballast::cuda
