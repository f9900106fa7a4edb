// Gradients of q, k and v turned back and rounded to E4M3 in one pass, with the bias's gradient.
#include "kernels/cuda/ops/fp8_tile.cuh"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/rope.cuh"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

struct HeadGradients {
  const float *q, *k, *v;  ///< [tokens, heads, dim] each
  const float *cos, *sin;  ///< [tokens, dim / 2]
  int q_width, kv_width, dim;
};

/// A head lies within a tile, so a pair's other half and one of its angle's two numbers come from
/// a lane of the same row.
template <bool kBias>
__global__ void __launch_bounds__(kThreads, kBias ? 3 : 2)  // registers would spill
    rope_backward_kernel(HeadGradients in, Fp8Target to, float* partial) {
  await_earlier_work();
  __shared__ TileExchange exchange;
  __shared__ float scratch[kBias ? kThreads / 32 : 1][kTile];
  const TilePlace at(blockIdx.x, blockIdx.y);
  const int column = static_cast<int>(at.column0), half = in.dim / 2, within = column % in.dim;
  const bool high = within >= half, turns = column < in.q_width + in.kv_width;
  const bool in_q = column < in.q_width;
  const int stride = in_q ? in.q_width : in.kv_width;
  const float* from = in_q    ? in.q + column
                      : turns ? in.k + (column - in.q_width)
                              : in.v + (column - in.q_width - in.kv_width);
  const float* angles = high ? in.sin + (within - half) : in.cos + within;
  from += at.row0 * stride;
  angles += at.row0 * half;
  const int rows =
      column < to.width ? static_cast<int>(min(to.rows - at.row0, std::int64_t{kRows})) : 0;
  Tile t;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float own[kColumns] = {}, angle[kColumns] = {};
    if (i < rows) {
      load_eight(from, own);
      if (turns) load_eight(angles, angle);
    }
    from += stride;
    angles += half;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float other = __shfl_xor_sync(0xffffffffu, own[j], half / kColumns),
                  others_angle = __shfl_xor_sync(0xffffffffu, angle[j], half / kColumns);
      // Back by an angle, low halves turn as high ones do forwards.
      if (turns)
        own[j] = turned_high(other, own[j], high ? others_angle : angle[j],
                             high ? -angle[j] : others_angle);
    }
    put(t, i, pack(own));
  }
  if constexpr (kBias) store_sums(t, at, to.width, scratch, partial + at.down * to.width);
  store_rows(t, at, to);
  store_columns(t, at, to, exchange);
}

}  // namespace

cudaError_t fp8_rope_backward(const float* dq, const float* dk, const float* dv, const float* cos,
                              const float* sin, int q_heads, int kv_heads, int head_dim,
                              const Fp8Target& to, const GradientOut& d_bias, float* partial,
                              cudaStream_t stream) {
  if (head_dim % 16 != 0 || kTile % head_dim != 0) return cudaErrorInvalidValue;
  const HeadGradients in{dq, dk, dv, cos, sin, q_heads * head_dim, kv_heads * head_dim, head_dim};
  const auto kernel =
      d_bias.at != nullptr ? rope_backward_kernel<true> : rope_backward_kernel<false>;
  if (to.rows > 0)
    launch(kernel, dim3(tiles(to.width), tiles(to.rows)), kThreads, 0, stream, in, to, partial);
  if (d_bias.at == nullptr) return cudaGetLastError();
  return add_partials(partial, d_bias, to.width, static_cast<int>(tiles(to.rows)), stream);
}

}  // namespace ballast::cuda
