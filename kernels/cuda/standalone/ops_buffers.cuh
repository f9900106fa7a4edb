// What ops_bench checks and times with: random buffers on the GPU, comparison, a stopwatch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "kernels/cuda/ops/ops.hpp"

namespace ballast::cuda {

inline std::mt19937_64 generator;

inline void must(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

template <class T>
struct Buffer {
  std::size_t n = 0;
  T* data = nullptr;
  explicit Buffer(std::size_t count) : n(count) {
    must(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)), "cudaMalloc");
  }
  Buffer(Buffer&& other) noexcept : n(other.n), data(std::exchange(other.data, nullptr)) {}
  ~Buffer() { cudaFree(data); }
  void send(const std::vector<T>& from) {
    must(cudaMemcpy(data, from.data(), n * sizeof(T), cudaMemcpyHostToDevice), "send");
  }
  std::vector<T> read() const {
    std::vector<T> to(n);
    must(cudaMemcpy(to.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost), "read");
    return to;
  }
};

__device__ float noise(std::uint64_t i, std::uint64_t seed) {
  std::uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  float sum = 0;  // of four uniform numbers: close to normal, variance 1
  for (int k = 0; k < 4; ++k) sum += static_cast<float>((z >> (16 * k)) & 0xFFFF) / 65536.0f - 0.5f;
  return sum * 1.7320508f;
}
template <class T>
__global__ void fill_kernel(T* x, std::size_t n, float mean, float scale, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x)
    x[i] = static_cast<T>(mean + scale * noise(i, seed));
}
template <class T>
Buffer<T> random_buffer(std::size_t n, float mean = 0, float scale = 1) {
  Buffer<T> b(n);
  fill_kernel<<<1024, 256>>>(b.data, n, mean, scale, generator());
  must(cudaGetLastError(), "fill");
  return b;
}
/// NaN everywhere: what is not written shows.
template <class T>
Buffer<T> poisoned(std::size_t n) {
  Buffer<T> b(n);
  must(cudaMemset(b.data, 0xFF, n * sizeof(T)), "poison");
  return b;
}

inline std::vector<double> doubles(const Buffer<float>& b) {
  const auto x = b.read();
  return {x.begin(), x.end()};
}
inline std::vector<double> doubles(const Buffer<Bf16>& b) {
  std::vector<double> y;
  for (Bf16 v : b.read()) y.push_back(__bfloat162float(v));
  return y;
}

inline bool all_good = true;
/// ||x - reference|| / ||reference||.
inline void expect(const char* what, const std::vector<double>& x,
                   const std::vector<double>& reference, double limit) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    difference += (x[i] - reference[i]) * (x[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  const double error = std::sqrt(difference / std::max(norm, 1e-300));
  const bool good = error <= limit;  // false for NaN
  all_good = all_good && good;
  std::printf("%-58s %.2e  (limit %.0e)  %s\n", what, error, limit, good ? "ok" : "WRONG");
}

/// Median milliseconds of seven measurements of `count` calls each; call i gets i.
inline double time_ms(int count, const std::function<void(int)>& call) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int repeat = 0; repeat < 9; ++repeat) {
    must(cudaEventRecord(begin), "event");
    for (int i = 0; i < count; ++i) call(i);
    must(cudaEventRecord(end), "event");
    must(cudaEventSynchronize(end), "timed calls");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (repeat >= 2) times.push_back(ms / count);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

inline double copy_rate = 0;  // bytes read and written a second
inline void line(const char* what, double ms, double bytes) {
  std::printf("%-52s %8.4f ms  %6.0f GB/s  %.2f of a copy\n", what, ms, bytes / ms * 1e-6,
              bytes / ms * 1e3 / copy_rate);
}

struct Shape {
  const char* name;
  std::int64_t tokens;
  int hidden, q_heads, kv_heads, dim, intermediate;
  std::int64_t parameters;
};

constexpr int kSets = 8;  // in turn, so that L2 does not serve one call what the last one wrote

}  // namespace ballast::cuda
