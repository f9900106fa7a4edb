// What checks and timings share: device buffers, random data, one attention problem on the device.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "kernels/cuda/attention/attention.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/standalone/attention_cases.hpp"
#include "kernels/cuda/standalone/attention_reference.cuh"

#define CHECK(call)                                                                               \
  do {                                                                                            \
    const cudaError_t check_error = (call);                                                       \
    if (check_error != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(check_error)); \
      std::exit(1);                                                                               \
    }                                                                                             \
  } while (0)

namespace bench {
using namespace ballast::cuda;

template <class T>
struct Buffer {
  T* data = nullptr;
  std::int64_t size = 0;
  explicit Buffer(std::int64_t n) : size(n) {
    CHECK(cudaMalloc(&data, std::max<std::int64_t>(n, 1) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(static_cast<std::int64_t>(v.size())) {
    if (size > 0) CHECK(cudaMemcpy(data, v.data(), size * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void poison() { CHECK(cudaMemset(data, 0xFF, size * sizeof(T))); }  // NaN as bf16 and as fp32
  std::vector<T> host() const {
    std::vector<T> v(static_cast<std::size_t>(size));
    if (size > 0) CHECK(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
};

__device__ inline float normal(std::uint64_t x) {  // splitmix64, Box-Muller
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  const float u = ((x >> 40) + 1) * (1.0f / 16777217), w = (x & 0xFFFFFF) * (1.0f / 16777216);
  return sqrtf(-2 * logf(u)) * cosf(6.2831853f * w);
}
template <class T>
__global__ void fill_normal(T* out, std::int64_t n, std::uint64_t seed) {
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i < n) out[i] = T(normal(seed << 40 ^ i));
}
template <class T>
void randomise(Buffer<T>& b, std::uint64_t seed) {
  fill_normal<<<static_cast<unsigned>((b.size + 255) / 256 + 1), 256>>>(b.data, b.size, seed);
  CHECK(cudaGetLastError());
}

inline std::uint64_t g_seed = 1;

/// One attention problem on the device: inputs (q, k, v slices of fused buffers), outputs, index.
struct Problem {
  PatternArrays host;
  int hq, hkv, d;
  std::int64_t q_stride, kv_stride;
  Buffer<bf16> qb, kvb, dout, o16;
  Buffer<float> o32, lse, dq, dk, dv;
  IndexShape shape;
  Buffer<char> index_buffer;
  DeviceIndex index;
  Buffer<char> workspace;
  double scale;

  Problem(PatternArrays x, int q_heads, int kv_heads, int head_dim)
      : host(std::move(x)),
        hq(q_heads),
        hkv(kv_heads),
        d(head_dim),
        q_stride(hq * d + 8),
        kv_stride(2 * hkv * d + 16),
        qb(host.q_tokens() * q_stride + 8),
        kvb(host.k_tokens * kv_stride),
        dout(host.q_tokens() * hq * d),
        o16(host.q_tokens() * hq * d),
        o32(host.q_tokens() * hq * d),
        lse(host.q_tokens() * hq),
        dq(host.q_tokens() * hq * d),
        dk(host.k_tokens * hkv * d),
        dv(host.k_tokens * hkv * d),
        shape(shape_of(host, hq, hkv, d)),
        index_buffer(static_cast<std::int64_t>(index_bytes(shape))),
        index(bind_index(shape, index_buffer.data)),
        workspace(bytes()),
        scale(1 / std::sqrt(double(d))) {
    index_buffer.poison();
    workspace.poison();
    CHECK(upload_index(host, index, 0));
    CHECK(derive_index(index, 0));
    CHECK(cudaDeviceSynchronize());
    randomise(qb, g_seed++);
    randomise(kvb, g_seed++);
    randomise(dout, g_seed++);
  }
  std::int64_t bytes() {
    return static_cast<std::int64_t>(std::max(attention_forward_workspace(forward_args(false)),
                                              attention_backward_workspace(backward_args())));
  }
  AttentionForwardArgs forward_args(bool fp32) {
    AttentionForwardArgs a;
    a.q = qb.data + 8;
    a.k = kvb.data;
    a.v = kvb.data + hkv * d;
    a.q_stride = q_stride;
    a.k_stride = a.v_stride = kv_stride;
    a.q_heads = hq;
    a.kv_heads = hkv;
    a.head_dim = d;
    a.scale = static_cast<float>(scale);
    a.o = fp32 ? static_cast<void*>(o32.data) : o16.data;
    a.o_fp32 = fp32;
    a.o_stride = hq * d;
    a.lse = lse.data;
    a.index = &index;
    a.workspace = workspace.data;
    a.workspace_bytes = static_cast<std::size_t>(workspace.size);
    return a;
  }
  AttentionBackwardArgs backward_args() {
    AttentionBackwardArgs a;
    a.q = qb.data + 8;
    a.k = kvb.data;
    a.v = kvb.data + hkv * d;
    a.dout = dout.data;
    a.q_stride = q_stride;
    a.k_stride = a.v_stride = kv_stride;
    a.dout_stride = a.o_stride = a.dq_stride = hq * d;
    a.dk_stride = a.dv_stride = hkv * d;
    a.q_heads = hq;
    a.kv_heads = hkv;
    a.head_dim = d;
    a.scale = static_cast<float>(scale);
    a.o = o32.data;
    a.o_fp32 = true;
    a.lse = lse.data;
    a.dq = dq.data;
    a.dk = dk.data;
    a.dv = dv.data;
    a.index = &index;
    a.workspace = workspace.data;
    a.workspace_bytes = static_cast<std::size_t>(workspace.size);
    return a;
  }
};

/// Median time of f() in milliseconds, after two calls that do not count.
template <class F>
double median_ms(F f, int repeats) {
  for (int i = 0; i < 2; ++i) f();
  std::vector<float> times;
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  for (int i = 0; i < repeats; ++i) {
    CHECK(cudaEventRecord(a));
    f();
    CHECK(cudaEventRecord(b));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace bench
