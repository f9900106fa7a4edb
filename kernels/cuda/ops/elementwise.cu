// RoPE, SwiGLU, conversions and additions: one pass over memory each.
#include "core/base/random.hpp"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
unsigned blocks_for(std::int64_t n) {
  const std::int64_t blocks = (n + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > (1 << 20) ? (1 << 20) : blocks);
}
__device__ std::int64_t thread_index() {
  return blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
}
__device__ std::int64_t thread_count() { return gridDim.x * static_cast<std::int64_t>(blockDim.x); }

__global__ void rope_table_kernel(const std::int32_t* positions, const double* frequency,
                                  double scale, float* cos_out, float* sin_out, std::int64_t n,
                                  int half) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    double s, c;
    sincos(positions[i / half] * frequency[i % half], &s, &c);
    cos_out[i] = static_cast<float>(c * scale);
    sin_out[i] = static_cast<float>(s * scale);
  }
}

// A thread rotates two neighbouring pairs (j, j + half), (j + 1, j + 1 + half).
__global__ void rope_kernel(const __nv_bfloat16* x, std::int64_t x_stride, const float* cos_table,
                            const float* sin_table, float sign, __nv_bfloat16* y,
                            std::int64_t y_stride, std::int64_t n, int heads, int half) {
  const int pairs = half / 2;
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const int j = 2 * static_cast<int>(i % pairs),
              at = static_cast<int>(i / pairs % heads) * 2 * half + j;
    const std::int64_t t = i / pairs / heads;
    const float2 a =
        __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x + t * x_stride + at));
    const float2 b =
        __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x + t * x_stride + at + half));
    const float2 c = *reinterpret_cast<const float2*>(cos_table + t * half + j);
    const float2 s = *reinterpret_cast<const float2*>(sin_table + t * half + j);
    *reinterpret_cast<__nv_bfloat162*>(y + t * y_stride + at) =
        __floats2bfloat162_rn(a.x * c.x - sign * b.x * s.x, a.y * c.y - sign * b.y * s.y);
    *reinterpret_cast<__nv_bfloat162*>(y + t * y_stride + at + half) =
        __floats2bfloat162_rn(b.x * c.x + sign * a.x * s.x, b.y * c.y + sign * a.y * s.y);
  }
}

__global__ void swiglu_kernel(const Pack8* gate_up, Pack8* y, std::int64_t n, std::int64_t packs) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / packs, c = i % packs;
    float g[8], u[8];
    unpack(gate_up[row * 2 * packs + c], g);
    unpack(gate_up[row * 2 * packs + packs + c], u);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = g[j] / (1 + __expf(-g[j])) * u[j];
    y[i] = pack(g);
  }
}

__global__ void swiglu_backward_kernel(const Pack8* gate_up, const Pack8* d_y, Pack8* d_gate_up,
                                       std::int64_t n, std::int64_t packs) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / packs, c = i % packs;
    float g[8], u[8], d[8];
    unpack(gate_up[row * 2 * packs + c], g);
    unpack(gate_up[row * 2 * packs + packs + c], u);
    unpack(d_y[i], d);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float s = 1 / (1 + __expf(-g[j])), silu = g[j] * s;
      g[j] = d[j] * u[j] * s * (1 + g[j] * (1 - s));
      u[j] = d[j] * silu;
    }
    d_gate_up[row * 2 * packs + c] = pack(g);
    d_gate_up[row * 2 * packs + packs + c] = pack(u);
  }
}

template <class T>
__global__ void add_kernel(const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride,
                           T* out, std::int64_t out_stride, std::int64_t n, std::int64_t width) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / width, c = i % width;
    out[row * out_stride + c] = static_cast<T>(static_cast<float>(a[row * a_stride + c]) +
                                               static_cast<float>(b[row * b_stride + c]));
  }
}

template <class X, class Y>
__global__ void convert_kernel(const X* x, std::int64_t x_stride, Y* y, std::int64_t y_stride,
                               std::int64_t n, std::int64_t width) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / width, c = i % width;
    y[row * y_stride + c] = static_cast<Y>(static_cast<float>(x[row * x_stride + c]));
  }
}

template <class X, class Y>
void convert(const void* x, std::int64_t x_stride, void* y, std::int64_t y_stride,
             std::int64_t rows, std::int64_t width, cudaStream_t stream) {
  convert_kernel<<<blocks_for(rows * width), kThreads, 0, stream>>>(
      static_cast<const X*>(x), x_stride, static_cast<Y*>(y), y_stride, rows * width, width);
}

// A thread draws once for four neighbouring columns.
__global__ void dropout_kernel(const __nv_bfloat16* x, std::int64_t x_stride,
                               const std::int64_t* keys, std::uint64_t stream_id,
                               std::uint32_t threshold, float scale, __nv_bfloat16* y,
                               std::int64_t y_stride, std::int64_t n, std::int64_t width) {
  const std::int64_t groups = (width + 3) / 4;
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / groups, group = i % groups;
    std::uint32_t words[4] = {threshold, threshold, threshold, threshold};
    if (keys) {
      const auto drawn = philox(stream_id, static_cast<std::uint64_t>(keys[row]),
                                static_cast<std::uint64_t>(group));
      for (int w = 0; w < 4; ++w) words[w] = drawn[w];
    }
    for (int w = 0; w < 4 && 4 * group + w < width; ++w) {
      const std::int64_t c = 4 * group + w;
      y[row * y_stride + c] = __float2bfloat16_rn(
          words[w] >= threshold ? scale * __bfloat162float(x[row * x_stride + c]) : 0.0f);
    }
  }
}

}  // namespace

cudaError_t dropout(const Bf16* x, std::int64_t x_stride, const std::int64_t* keys,
                    std::uint64_t stream_id, std::uint32_t threshold, float scale, Bf16* y,
                    std::int64_t y_stride, std::int64_t rows, std::int64_t width,
                    cudaStream_t stream) {
  const std::int64_t n = rows * ((width + 3) / 4);
  if (n > 0)
    dropout_kernel<<<blocks_for(n), kThreads, 0, stream>>>(x, x_stride, keys, stream_id, threshold,
                                                           scale, y, y_stride, n, width);
  return cudaGetLastError();
}

cudaError_t rope_table(const std::int32_t* positions, const double* frequency, double scale,
                       float* cos, float* sin, std::int64_t tokens, int half, cudaStream_t stream) {
  if (tokens > 0)
    rope_table_kernel<<<blocks_for(tokens * half), kThreads, 0, stream>>>(
        positions, frequency, scale, cos, sin, tokens * half, half);
  return cudaGetLastError();
}

cudaError_t rope_apply(const Bf16* x, std::int64_t x_stride, const float* cos, const float* sin,
                       bool transposed, Bf16* y, std::int64_t y_stride, std::int64_t tokens,
                       int heads, int head_dim, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  if (head_dim % 4 != 0 || x_stride % 2 != 0 || y_stride % 2 != 0) return cudaErrorInvalidValue;
  const std::int64_t n = tokens * heads * (head_dim / 4);
  rope_kernel<<<blocks_for(n), kThreads, 0, stream>>>(
      x, x_stride, cos, sin, transposed ? -1.0f : 1.0f, y, y_stride, n, heads, head_dim / 2);
  return cudaGetLastError();
}

cudaError_t swiglu_forward(const Bf16* gate_up, Bf16* y, std::int64_t rows, std::int64_t width,
                           cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  const std::int64_t n = rows * (width / 8);
  swiglu_kernel<<<blocks_for(n), kThreads, 0, stream>>>(reinterpret_cast<const Pack8*>(gate_up),
                                                        reinterpret_cast<Pack8*>(y), n, width / 8);
  return cudaGetLastError();
}

cudaError_t swiglu_backward(const Bf16* gate_up, const Bf16* d_y, Bf16* d_gate_up,
                            std::int64_t rows, std::int64_t width, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  const std::int64_t n = rows * (width / 8);
  swiglu_backward_kernel<<<blocks_for(n), kThreads, 0, stream>>>(
      reinterpret_cast<const Pack8*>(gate_up), reinterpret_cast<const Pack8*>(d_y),
      reinterpret_cast<Pack8*>(d_gate_up), n, width / 8);
  return cudaGetLastError();
}

cudaError_t add_rows(const void* a, std::int64_t a_stride, const void* b, std::int64_t b_stride,
                     void* out, std::int64_t out_stride, bool is_float, std::int64_t rows,
                     std::int64_t width, cudaStream_t stream) {
  const std::int64_t n = rows * width;
  if (n == 0) return cudaSuccess;
  const auto launch = [&]<class T>(T*) {
    add_kernel<T><<<blocks_for(n), kThreads, 0, stream>>>(
        static_cast<const T*>(a), a_stride, static_cast<const T*>(b), b_stride,
        static_cast<T*>(out), out_stride, n, width);
  };
  if (is_float)
    launch(static_cast<float*>(nullptr));
  else
    launch(static_cast<__nv_bfloat16*>(nullptr));
  return cudaGetLastError();
}

cudaError_t convert_rows(const void* x, bool x_float, std::int64_t x_stride, void* y, bool y_float,
                         std::int64_t y_stride, std::int64_t rows, std::int64_t width,
                         cudaStream_t stream) {
  if (rows * width == 0) return cudaSuccess;
  if (x_float == y_float) {
    const std::size_t element = x_float ? 4 : 2;
    return cudaMemcpy2DAsync(y, y_stride * element, x, x_stride * element, width * element, rows,
                             cudaMemcpyDeviceToDevice, stream);
  }
  if (x_float)
    convert<float, __nv_bfloat16>(x, x_stride, y, y_stride, rows, width, stream);
  else
    convert<__nv_bfloat16, float>(x, x_stride, y, y_stride, rows, width, stream);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
