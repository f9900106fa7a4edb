// QK-norm with the rotation.  A group of lanes takes a head: each lane eight columns of the low
// half and the eight of the high half that they turn with, so that a head is read once, in 16-byte
// pieces.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/rope.cuh"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxDim = 256;
constexpr int kHeads = 2;                              // of a token that a group of lanes takes
constexpr int kBackwardBlocks = 2 * kMultiprocessors;  // each with a partial sum of the weights'

/// Eight columns of each half of a head.
struct Halves {
  float low[8], high[8];
};

__device__ Halves load_halves(const float* head, int half) {
  Halves h;
  load_eight(head, h.low);
  load_eight(head + half, h.high);
  return h;
}
/// The same as they lie, in half the registers.
struct PackedHalves {
  Pack8 low, high;
};
__device__ PackedHalves load_packed(const __nv_bfloat16* head, int half) {
  return {*reinterpret_cast<const Pack8*>(head), *reinterpret_cast<const Pack8*>(head + half)};
}
__device__ Halves unpacked(const PackedHalves& p) {
  Halves h;
  unpack(p.low, h.low);
  unpack(p.high, h.high);
  return h;
}
__device__ void store_halves(const Halves& h, __nv_bfloat16* head, int half) {
  *reinterpret_cast<Pack8*>(head) = pack(h.low);
  *reinterpret_cast<Pack8*>(head + half) = pack(h.high);
}

/// Sum over the kGroup lanes of a head, on each; all lanes of the warp call it.
template <int kGroup>
__device__ float group_sum(float x) {
#pragma unroll
  for (int offset = kGroup / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ float products(const Halves& a, const Halves& b) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += a.low[j] * b.low[j] + a.high[j] * b.high[j];
  return sum;
}
/// 1 / rms; forward and backward agree bit for bit by it.
template <int kGroup>
__device__ float reciprocal_rms(const Halves& x, int dim, float eps) {
  return rsqrtf(group_sum<kGroup>(products(x, x)) / static_cast<float>(dim) + eps);
}

/// What a group of lanes does: some heads of a token, whose angles it loads once.
struct Item {
  std::int64_t token;
  int first, last;  ///< heads; none where the item lies past the end or the lane past the head
  __device__ Item(std::int64_t number, std::int64_t tokens, int heads, bool lane_has_columns) {
    const int pieces = (heads + kHeads - 1) / kHeads;
    token = number / pieces;
    first = static_cast<int>(number - token * pieces) * kHeads;
    last = min(first + kHeads, heads);
    if (token >= tokens || !lane_has_columns) token = 0, last = first;
  }
  __host__ __device__ static std::int64_t count(std::int64_t tokens, int heads) {
    return tokens * ((heads + kHeads - 1) / kHeads);
  }
};

template <int kGroup>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __nv_bfloat16* x, std::int64_t stride, const __nv_bfloat16* w_q,
                   const __nv_bfloat16* w_k, float eps, const float* cos, const float* sin,
                   __nv_bfloat16* y, std::int64_t tokens, int q_heads, int heads, int dim) {
  await_earlier_work();
  const int half = dim / 2, column = static_cast<int>(threadIdx.x % kGroup) * 8;
  const Item item((blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / kGroup, tokens, heads,
                  column < half);
  PackedHalves packed[kHeads] = {};
#pragma unroll
  for (int i = 0; i < kHeads; ++i)
    if (item.first + i < item.last)
      packed[i] = load_packed(x + item.token * stride + (item.first + i) * dim + column, half);
  float c[8] = {}, s[8] = {};
  if (item.first < item.last) {
    load_eight(cos + item.token * half + column, c);
    load_eight(sin + item.token * half + column, s);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    Halves v = unpacked(packed[i]);
    const float scale = reciprocal_rms<kGroup>(v, dim, eps);  // lanes without heads join in
    const int head = item.first + i;
    if (head >= item.last) continue;
    const Halves w = unpacked(load_packed((head < q_heads ? w_q : w_k) + column, half));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = v.low[j] * scale * w.low[j], b = v.high[j] * scale * w.high[j];
      v.low[j] = turned_low(a, b, c[j], s[j]);
      v.high[j] = turned_high(a, b, c[j], s[j]);
    }
    store_halves(v, y + (item.token * heads + head) * dim + column, half);
  }
}

struct Backward {
  const float *dq, *dk, *dv;  ///< [tokens, heads, dim] each
  const __nv_bfloat16* x;     ///< rows of q and k before the norm
  std::int64_t x_stride;
  const __nv_bfloat16 *w_q, *w_k;
  float eps;
  const float *cos, *sin;  ///< [tokens, dim / 2]
  __nv_bfloat16* d_qkv;
  std::int64_t d_stride;
  float* partial;  ///< [2][blocks][dim]: of w_q, then of w_k
  std::int64_t tokens;
  int q_heads, kv_heads, dim;
};

/// The sums of a block's lanes by column: lanes of a warp that share columns by shuffles, then warp
/// after warp.
template <int kGroup>
__device__ void store_partial(Halves (&sums)[2], const Backward& in) {
  __shared__ float total[2][kMaxDim];
  const int half = in.dim / 2, lane = static_cast<int>(threadIdx.x % 32),
            column = lane % kGroup * 8, warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int offset = kGroup; offset < 32; offset *= 2)
#pragma unroll
    for (Halves& h : sums)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        h.low[j] += __shfl_xor_sync(0xffffffffu, h.low[j], offset);
        h.high[j] += __shfl_xor_sync(0xffffffffu, h.high[j], offset);
      }
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn && lane < kGroup && column < half)
#pragma unroll
      for (int which = 0; which < 2; ++which)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float &low = total[which][column + j], &high = (&low)[half];
          low = sums[which].low[j] + (turn > 0 ? low : 0.0f);
          high = sums[which].high[j] + (turn > 0 ? high : 0.0f);
        }
    __syncthreads();
  }
  for (int c = static_cast<int>(threadIdx.x); c < 2 * in.dim; c += kThreads) {
    const int which = c / in.dim, at = c % in.dim;
    in.partial[(which * static_cast<std::int64_t>(gridDim.x) + blockIdx.x) * in.dim + at] =
        total[which][at];
  }
}

/// Gradient of one head's rows, `head` of q, k and v side by side; [tokens, heads, dim] each.
__device__ const float* gradient_of(const Backward& in, std::int64_t token, int head) {
  const int in_k = head - in.q_heads, in_v = in_k - in.kv_heads;
  return in_k < 0   ? in.dq + (token * in.q_heads + head) * in.dim
         : in_v < 0 ? in.dk + (token * in.kv_heads + in_k) * in.dim
                    : in.dv + (token * in.kv_heads + in_v) * in.dim;
}

template <int kGroup, bool kWeights>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks / kMultiprocessors)
    backward_kernel(Backward in) {
  await_earlier_work();
  const int half = in.dim / 2, column = static_cast<int>(threadIdx.x % kGroup) * 8,
            turned = in.q_heads + in.kv_heads, heads = turned + in.kv_heads;
  const std::int64_t items = Item::count(in.tokens, heads), groups = kThreads / kGroup,
                     own = threadIdx.x / kGroup;
  Halves sums[2] = {};
  for (std::int64_t first = blockIdx.x * groups; first < items; first += gridDim.x * groups) {
    const Item item(first + own, in.tokens, heads, column < half);
    float c[8] = {}, s[8] = {};
    if (item.first < min(item.last, turned)) {
      load_eight(in.cos + item.token * half + column, c);
      load_eight(in.sin + item.token * half + column, s);
    }
#pragma unroll 2
    for (int i = 0; i < kHeads; ++i) {
      const int head = item.first + i;
      const bool active = head < item.last, normed = active && head < turned;
      Halves d{}, x{}, w{}, dw;
      if (active) d = load_halves(gradient_of(in, item.token, head) + column, half);
      if (normed) {
        x = unpacked(load_packed(in.x + item.token * in.x_stride + head * in.dim + column, half));
        w = unpacked(load_packed((head < in.q_heads ? in.w_q : in.w_k) + column, half));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float a = d.low[j], b = d.high[j];
          d.low[j] = turned_low(a, b, c[j], -s[j]);
          d.high[j] = turned_high(a, b, c[j], -s[j]);
        }
      }
      const float scale = reciprocal_rms<kGroup>(x, in.dim, in.eps);  // all lanes join in
#pragma unroll
      for (int j = 0; j < 8; ++j)
        dw.low[j] = d.low[j] * w.low[j], dw.high[j] = d.high[j] * w.high[j];
      const float mean =
          group_sum<kGroup>(products(dw, x)) * scale * scale / static_cast<float>(in.dim);
      if (!active) continue;
      if (normed) {
        if constexpr (kWeights) {
          const float to_q = head < in.q_heads ? scale : 0.0f, to_k = scale - to_q;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const float low = d.low[j] * x.low[j], high = d.high[j] * x.high[j];
            sums[0].low[j] += low * to_q, sums[0].high[j] += high * to_q;
            sums[1].low[j] += low * to_k, sums[1].high[j] += high * to_k;
          }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          d.low[j] = scale * (dw.low[j] - x.low[j] * mean);
          d.high[j] = scale * (dw.high[j] - x.high[j] * mean);
        }
      }
      store_halves(d, in.d_qkv + item.token * in.d_stride + head * in.dim + column, half);
    }
  }
  if constexpr (kWeights) store_partial<kGroup>(sums, in);
}

/// Calls f with the lanes a head as a constant.
template <class F>
void with_group(int dim, F&& f) {
  if (dim <= 64)
    f(std::integral_constant<int, 4>());
  else if (dim <= 128)
    f(std::integral_constant<int, 8>());
  else
    f(std::integral_constant<int, 16>());
}
bool fits(int dim, std::int64_t stride) {
  return dim > 0 && dim % 16 == 0 && dim <= kMaxDim && stride % 8 == 0;
}

}  // namespace

cudaError_t qk_norm_rope(const Bf16* x, std::int64_t stride, const Bf16* w_q, const Bf16* w_k,
                         double eps, const float* cos, const float* sin, Bf16* y,
                         std::int64_t tokens, int q_heads, int kv_heads, int head_dim,
                         cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  if (!fits(head_dim, stride)) return cudaErrorInvalidValue;
  const int heads = q_heads + kv_heads;
  with_group(head_dim, [&](auto size) {
    constexpr int kGroup = decltype(size)::value, kEach = kThreads / kGroup;
    launch(forward_kernel<kGroup>,
           static_cast<unsigned>((Item::count(tokens, heads) + kEach - 1) / kEach), kThreads, 0,
           stream, x, stride, w_q, w_k, static_cast<float>(eps), cos, sin, y, tokens, q_heads,
           heads, head_dim);
  });
  return cudaGetLastError();
}

std::size_t qk_norm_partial_floats(int head_dim) {
  return std::size_t{2} * kBackwardBlocks * head_dim;
}

cudaError_t qk_norm_rope_backward(const QkNormBackward& a, cudaStream_t stream) {
  if (!fits(a.head_dim, a.stride) || a.d_stride % 8 != 0) return cudaErrorInvalidValue;
  const bool weights = a.d_w_q.at != nullptr;
  int blocks = 0;  // without tokens the partial sums are none
  if (a.tokens > 0)
    with_group(a.head_dim, [&](auto size) {
      constexpr int kGroup = decltype(size)::value, kEach = kThreads / kGroup;
      const std::int64_t items = Item::count(a.tokens, a.q_heads + 2 * a.kv_heads);
      blocks =
          static_cast<int>(std::min<std::int64_t>(kBackwardBlocks, (items + kEach - 1) / kEach));
      const auto kernel = weights ? backward_kernel<kGroup, true> : backward_kernel<kGroup, false>;
      launch(kernel, static_cast<unsigned>(blocks), kThreads, 0, stream,
             Backward{a.dq, a.dk, a.dv, a.x, a.stride, a.w_q, a.w_k, static_cast<float>(a.eps),
                      a.cos, a.sin, a.d_qkv, a.d_stride, a.partial, a.tokens, a.q_heads, a.kv_heads,
                      a.head_dim});
    });
  if (!weights) return cudaGetLastError();
  if (const cudaError_t error = add_partials(a.partial, a.d_w_q, a.head_dim, blocks, stream);
      error != cudaSuccess)
    return error;
  return add_partials(a.partial + static_cast<std::int64_t>(blocks) * a.head_dim, a.d_w_k,
                      a.head_dim, blocks, stream);
}

}  // namespace ballast::cuda
