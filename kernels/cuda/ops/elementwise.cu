// RoPE, SwiGLU, dropout, first values, conversions and additions: one pass over memory each.
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/rope.cuh"
#include "kernels/cuda/ops/swiglu.cuh"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/reduce.cuh"
#include "kernels/ops/dropout_draw.hpp"

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
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    double s, c;
    sincos(positions[i / half] * frequency[i % half], &s, &c);
    cos_out[i] = static_cast<float>(c * scale);
    sin_out[i] = static_cast<float>(s * scale);
  }
}

__device__ float4 load_four(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ float4 load_four(const __nv_bfloat16* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const float2 low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x)),
               high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ void store_four(float* p, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
}
__device__ void store_four(__nv_bfloat16* p, float a, float b, float c, float d) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(a, b), high = __floats2bfloat162_rn(c, d);
  *reinterpret_cast<uint2*>(p) =
      make_uint2(reinterpret_cast<const unsigned&>(low), reinterpret_cast<const unsigned&>(high));
}

constexpr int kRopeTokens = 4;  // tokens a block

/// Calls f(token, head, j) for the block's tokens, all heads and every fourth j below `half`.
template <class F>
__device__ void for_each_four_pairs(std::int64_t tokens, unsigned heads, unsigned half,
                                    const F& f) {
  const unsigned quads = half / 4, each = heads * quads;
  const std::int64_t first = blockIdx.x * std::int64_t{kRopeTokens};
  const unsigned count =
      static_cast<unsigned>(min(tokens - first, std::int64_t{kRopeTokens})) * each;
  for (unsigned i = threadIdx.x; i < count; i += kThreads) {
    const unsigned token = i / each, rest = i - token * each, head = rest / quads;
    f(first + token, head, 4 * (rest - head * quads));
  }
}

/// Four pairs (a, b) turned by the angles of cosines c and sines s; written to y and y + half.
__device__ void store_turned(float4 a, float4 b, float4 c, float4 s, __nv_bfloat16* y, int half) {
  store_four(y, turned_low(a.x, b.x, c.x, s.x), turned_low(a.y, b.y, c.y, s.y),
             turned_low(a.z, b.z, c.z, s.z), turned_low(a.w, b.w, c.w, s.w));
  store_four(y + half, turned_high(a.x, b.x, c.x, s.x), turned_high(a.y, b.y, c.y, s.y),
             turned_high(a.z, b.z, c.z, s.z), turned_high(a.w, b.w, c.w, s.w));
}

__device__ float rounded_sum(float x, float y) {
  return __bfloat162float(__float2bfloat16_rn(x + y));
}
__device__ float4 rounded_sum(float4 x, float4 y) {
  return make_float4(rounded_sum(x.x, y.x), rounded_sum(x.y, y.y), rounded_sum(x.z, y.z),
                     rounded_sum(x.w, y.w));
}

// A sum with the bias is rounded to bf16 before it is turned.
template <bool kBias>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(__nv_bfloat16* x, std::int64_t stride, const __nv_bfloat16* bias,
                const float* cos_table, const float* sin_table, std::int64_t tokens, int heads,
                int turned, int half) {
  await_earlier_work();
  for_each_four_pairs(tokens, heads, half, [&](std::int64_t t, unsigned head, unsigned j) {
    const unsigned at = head * 2 * half + j;
    __nv_bfloat16* place = x + t * stride + at;
    float4 a = load_four(place), b = load_four(place + half);
    if constexpr (kBias) {
      a = rounded_sum(a, load_four(bias + at));
      b = rounded_sum(b, load_four(bias + at + half));
      if (static_cast<int>(head) >= turned) {
        store_four(place, a.x, a.y, a.z, a.w);
        store_four(place + half, b.x, b.y, b.z, b.w);
        return;
      }
    }
    store_turned(a, b, load_four(cos_table + t * half + j), load_four(sin_table + t * half + j),
                 place, half);
  });
}

__global__ void __launch_bounds__(kThreads)
    rope_backward_kernel(const float* dq, const float* dk, const float* dv, const float* cos_table,
                         const float* sin_table, __nv_bfloat16* d_qkv, std::int64_t stride,
                         std::int64_t tokens, int q_heads, int kv_heads, int half) {
  await_earlier_work();
  for_each_four_pairs(
      tokens, q_heads + 2 * kv_heads, half, [&](std::int64_t t, unsigned head, unsigned j) {
        const int in_k = static_cast<int>(head) - q_heads, in_v = in_k - kv_heads;
        const float* from = in_k < 0   ? dq + (t * q_heads + head) * 2 * half + j
                            : in_v < 0 ? dk + (t * kv_heads + in_k) * 2 * half + j
                                       : dv + (t * kv_heads + in_v) * 2 * half + j;
        float4 c = make_float4(1, 1, 1, 1), s = make_float4(0, 0, 0, 0);  // dV stays as it is
        if (in_v < 0) {
          c = load_four(cos_table + t * half + j);
          s = load_four(sin_table + t * half + j);
        }
        store_turned(load_four(from), load_four(from + half), c,
                     make_float4(-s.x, -s.y, -s.z, -s.w), d_qkv + t * stride + head * 2 * half + j,
                     half);
      });
}

__global__ void swiglu_kernel(const Pack8* gate_up, Pack8* y, std::int64_t n, std::int64_t packs) {
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / packs, c = i % packs;
    y[i] = swiglu_of(gate_up[row * 2 * packs + c], gate_up[row * 2 * packs + packs + c]);
  }
}

template <bool kAgain>
__global__ void swiglu_backward_kernel(const Pack8* gate_up, const Pack8* d_y, Pack8* d_gate_up,
                                       Pack8* y, std::int64_t n, std::int64_t packs) {
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / packs, c = i % packs;
    const Pack8 gate = gate_up[row * 2 * packs + c], up = gate_up[row * 2 * packs + packs + c];
    const SwigluGradients d = swiglu_gradients(gate, up, d_y[i]);
    d_gate_up[row * 2 * packs + c] = d.d_gate;
    d_gate_up[row * 2 * packs + packs + c] = d.d_up;
    if constexpr (kAgain) y[i] = d.product;
  }
}

template <class A, class B, class Out>
__global__ void add_kernel(const A* a, std::int64_t a_stride, const B* b, std::int64_t b_stride,
                           Out* out, std::int64_t out_stride, std::int64_t n, std::int64_t width) {
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / width, c = i % width;
    out[row * out_stride + c] = static_cast<Out>(static_cast<float>(a[row * a_stride + c]) +
                                                 static_cast<float>(b[row * b_stride + c]));
  }
}

// Four columns a thread.
template <class A, class B, class Out>
__global__ void add_quads_kernel(const A* a, std::int64_t a_stride, const B* b,
                                 std::int64_t b_stride, Out* out, std::int64_t out_stride,
                                 std::int64_t n, std::int64_t quads) {
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / quads, c = 4 * (i - row * quads);
    const float4 x = load_four(a + row * a_stride + c), y = load_four(b + row * b_stride + c);
    store_four(out + row * out_stride + c, x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
  }
}

template <class X, class Y>
__global__ void convert_kernel(const X* x, std::int64_t x_stride, Y* y, std::int64_t y_stride,
                               std::int64_t n, std::int64_t width) {
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / width, c = i % width;
    y[row * y_stride + c] = static_cast<Y>(static_cast<float>(x[row * x_stride + c]));
  }
}

// Rows of fp32 to bf16, four columns a thread.
__global__ void narrow_kernel(const float* x, std::int64_t x_stride, __nv_bfloat16* y,
                              std::int64_t y_stride, std::int64_t n, std::int64_t quads) {
  await_earlier_work();
  for (std::int64_t i = thread_index(); i < n; i += thread_count()) {
    const std::int64_t row = i / quads, c = 4 * (i - row * quads);
    const float4 v = load_four(x + row * x_stride + c);
    store_four(y + row * y_stride + c, v.x, v.y, v.z, v.w);
  }
}

/// Whether rows are read and written so many columns at a time.
bool in_groups(int columns, const void* rows, std::int64_t stride, std::int64_t width) {
  return width % columns == 0 && stride % columns == 0 &&
         reinterpret_cast<std::uintptr_t>(rows) % 16 == 0;
}
bool in_quads(const void* rows, std::int64_t stride, std::int64_t width) {
  return in_groups(4, rows, stride, width);
}

unsigned rope_blocks(std::int64_t tokens) {
  return static_cast<unsigned>((tokens + kRopeTokens - 1) / kRopeTokens);
}

template <class X, class Y>
void convert(const void* x, std::int64_t x_stride, void* y, std::int64_t y_stride,
             std::int64_t rows, std::int64_t width, cudaStream_t stream) {
  launch(convert_kernel<X, Y>, blocks_for(rows * width), kThreads, 0, stream,
         static_cast<const X*>(x), x_stride, static_cast<Y*>(y), y_stride, rows * width, width);
}

// A thread draws once for its columns.  Rows are the grid's second dimension.
template <bool kPacks, bool kAdd>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const __nv_bfloat16* x, std::int64_t x_stride, const std::int64_t* keys,
                   std::uint64_t stream_id, std::uint32_t threshold, float scale, __nv_bfloat16* y,
                   std::int64_t y_stride, std::int64_t rows, std::int64_t width) {
  static_assert(kDropoutColumns == 8, "a pack of columns is one draw");
  await_earlier_work();
  const std::int64_t group = blockIdx.x * std::int64_t{kThreads} + threadIdx.x,
                     c = kDropoutColumns * group;
  if (c >= width) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const __nv_bfloat16* from = x + row * x_stride + c;
    __nv_bfloat16* to = y + row * y_stride + c;
    const auto drawn =
        philox(stream_id, static_cast<std::uint64_t>(keys[row]), static_cast<std::uint64_t>(group));
    const auto result = [&](int i, float in, float before) {
      const float value = dropout_stays(drawn, i, threshold) ? scale * in : 0.0f;
      return kAdd ? before + value : value;
    };
    if constexpr (kPacks) {
      float in[8], before[8] = {};
      unpack(*reinterpret_cast<const Pack8*>(from), in);
      if constexpr (kAdd) unpack(*reinterpret_cast<const Pack8*>(to), before);
#pragma unroll
      for (int i = 0; i < 8; ++i) in[i] = result(i, in[i], before[i]);
      *reinterpret_cast<Pack8*>(to) = pack(in);
    } else {
      for (int i = 0; i < kDropoutColumns && c + i < width; ++i)
        to[i] = __float2bfloat16_rn(
            result(i, __bfloat162float(from[i]), kAdd ? __bfloat162float(to[i]) : 0.0f));
    }
  }
}

__global__ void normal_kernel(__nv_bfloat16* out, std::int64_t n, double std, std::uint64_t seed,
                              std::uint64_t stream_id) {
  for (std::int64_t i = thread_index(); i < n; i += thread_count())
    out[i] = __float2bfloat16_rn(
        static_cast<float>(std * random_normal(seed, stream_id, static_cast<std::uint64_t>(i))));
}

}  // namespace

cudaError_t fill_normal(Bf16* out, std::int64_t n, double std, std::uint64_t seed,
                        std::uint64_t stream_id, cudaStream_t stream) {
  if (n > 0) normal_kernel<<<blocks_for(n), kThreads, 0, stream>>>(out, n, std, seed, stream_id);
  return cudaGetLastError();
}

cudaError_t dropout(const Bf16* x, std::int64_t x_stride, const std::int64_t* keys,
                    std::uint64_t stream_id, std::uint32_t threshold, float scale, Bf16* y,
                    std::int64_t y_stride, bool accumulate, std::int64_t rows, std::int64_t width,
                    cudaStream_t stream) {
  if (rows * width == 0) return cudaSuccess;
  constexpr int kColumns = kDropoutColumns * kThreads, kMostRows = 65535;  // a grid's
  const dim3 blocks(static_cast<unsigned>((width + kColumns - 1) / kColumns),
                    static_cast<unsigned>(rows < kMostRows ? rows : kMostRows));
  const bool packs = in_groups(kDropoutColumns, x, x_stride, width) &&
                     in_groups(kDropoutColumns, y, y_stride, width);
  const auto kernel =
      packs ? (accumulate ? dropout_kernel<true, true> : dropout_kernel<true, false>)
            : (accumulate ? dropout_kernel<false, true> : dropout_kernel<false, false>);
  launch(kernel, blocks, kThreads, 0, stream, x, x_stride, keys, stream_id, threshold, scale, y,
         y_stride, rows, width);
  return cudaGetLastError();
}

cudaError_t rope_table(const std::int32_t* positions, const double* frequency, double scale,
                       float* cos, float* sin, std::int64_t tokens, int half, cudaStream_t stream) {
  if (tokens > 0)
    launch(rope_table_kernel, blocks_for(tokens * half), kThreads, 0, stream, positions, frequency,
           scale, cos, sin, tokens * half, half);
  return cudaGetLastError();
}

cudaError_t rope_apply(Bf16* x, std::int64_t stride, const Bf16* bias, const float* cos,
                       const float* sin, std::int64_t tokens, int heads, int turned, int head_dim,
                       cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  if (head_dim % 8 != 0 || stride % 4 != 0) return cudaErrorInvalidValue;
  const auto kernel = bias != nullptr ? rope_kernel<true> : rope_kernel<false>;
  launch(kernel, rope_blocks(tokens), kThreads, 0, stream, x, stride, bias, cos, sin, tokens,
         bias != nullptr ? heads : turned, turned, head_dim / 2);
  return cudaGetLastError();
}

cudaError_t rope_backward(const float* dq, const float* dk, const float* dv, const float* cos,
                          const float* sin, Bf16* d_qkv, std::int64_t stride, std::int64_t tokens,
                          int q_heads, int kv_heads, int head_dim, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  if (head_dim % 8 != 0 || stride % 4 != 0) return cudaErrorInvalidValue;
  launch(rope_backward_kernel, rope_blocks(tokens), kThreads, 0, stream, dq, dk, dv, cos, sin,
         d_qkv, stride, tokens, q_heads, kv_heads, head_dim / 2);
  return cudaGetLastError();
}

cudaError_t swiglu_forward(const Bf16* gate_up, Bf16* y, std::int64_t rows, std::int64_t width,
                           cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  const std::int64_t n = rows * (width / 8);
  launch(swiglu_kernel, blocks_for(n), kThreads, 0, stream, reinterpret_cast<const Pack8*>(gate_up),
         reinterpret_cast<Pack8*>(y), n, width / 8);
  return cudaGetLastError();
}

cudaError_t swiglu_backward(const Bf16* gate_up, const Bf16* d_y, Bf16* d_gate_up, Bf16* y,
                            std::int64_t rows, std::int64_t width, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  const std::int64_t n = rows * (width / 8);
  launch(y == nullptr ? swiglu_backward_kernel<false> : swiglu_backward_kernel<true>, blocks_for(n),
         kThreads, 0, stream, reinterpret_cast<const Pack8*>(gate_up),
         reinterpret_cast<const Pack8*>(d_y), reinterpret_cast<Pack8*>(d_gate_up),
         reinterpret_cast<Pack8*>(y), n, width / 8);
  return cudaGetLastError();
}

cudaError_t add_rows(const void* a, bool a_float, std::int64_t a_stride, const void* b,
                     bool b_float, std::int64_t b_stride, void* out, bool out_float,
                     std::int64_t out_stride, std::int64_t rows, std::int64_t width,
                     cudaStream_t stream) {
  if (rows * width == 0) return cudaSuccess;
  if (a_float ? !b_float && !out_float : b_float || out_float) return cudaErrorInvalidValue;
  const bool quads = in_quads(a, a_stride, width) && in_quads(b, b_stride, width) &&
                     in_quads(out, out_stride, width);
  const auto add = [&]<class A, class B, class Out>(const A* x, const B* y, Out* sum) {
    const std::int64_t columns = quads ? width / 4 : width, n = rows * columns;
    launch(quads ? add_quads_kernel<A, B, Out> : add_kernel<A, B, Out>, blocks_for(n), kThreads, 0,
           stream, x, a_stride, y, b_stride, sum, out_stride, n, columns);
  };
  const auto *floats = static_cast<const float*>(a), *more = static_cast<const float*>(b);
  if (!a_float)
    add(static_cast<const Bf16*>(a), static_cast<const Bf16*>(b), static_cast<Bf16*>(out));
  else if (!b_float)
    add(floats, static_cast<const Bf16*>(b), static_cast<float*>(out));
  else if (out_float)
    add(floats, more, static_cast<float*>(out));
  else
    add(floats, more, static_cast<Bf16*>(out));
  return cudaGetLastError();
}

cudaError_t convert_rows(const void* x, bool x_float, std::int64_t x_stride, void* y, bool y_float,
                         std::int64_t y_stride, std::int64_t rows, std::int64_t width,
                         cudaStream_t stream) {
  if (rows * width == 0) return cudaSuccess;
  if (x_float == y_float) {
    const std::size_t element = x_float ? 4 : 2;
    // A pitch ends at 2 GiB; rows without gaps need none.
    if (x_stride == width && y_stride == width)
      return cudaMemcpyAsync(y, x, rows * width * element, cudaMemcpyDeviceToDevice, stream);
    return cudaMemcpy2DAsync(y, y_stride * element, x, x_stride * element, width * element, rows,
                             cudaMemcpyDeviceToDevice, stream);
  }
  if (x_float && in_quads(x, x_stride, width) && in_quads(y, y_stride, width))
    launch(narrow_kernel, blocks_for(rows * width / 4), kThreads, 0, stream,
           static_cast<const float*>(x), x_stride, static_cast<__nv_bfloat16*>(y), y_stride,
           rows * width / 4, width / 4);
  else if (x_float)
    convert<float, __nv_bfloat16>(x, x_stride, y, y_stride, rows, width, stream);
  else
    convert<__nv_bfloat16, float>(x, x_stride, y, y_stride, rows, width, stream);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
