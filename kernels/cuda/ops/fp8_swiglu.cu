// SwiGLU whose results are rounded to E4M3 where they are made.
#include <cuda_pipeline.h>

#include "kernels/cuda/ops/fp8_tile.cuh"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/swiglu.cuh"
#include "kernels/cuda/runtime/launch.cuh"

namespace ballast::cuda {
namespace {

struct GateUp {
  const Bf16* x;  ///< [rows, 2 width]
  std::int64_t width;
  __device__ Pack8 gate(std::int64_t row, std::int64_t column) const {
    return *reinterpret_cast<const Pack8*>(x + row * 2 * width + column);
  }
  __device__ Pack8 up(std::int64_t row, std::int64_t column) const {
    return gate(row, width + column);
  }
};

__global__ void __launch_bounds__(kThreads, 3) forward_kernel(GateUp in, Fp8Target to) {
  await_earlier_work();
  const TilePlace at(blockIdx.x, blockIdx.y);
  const Tile t = load_tile(at, to.rows, to.width, [=](std::int64_t row, std::int64_t column) {
    return swiglu_of(in.gate(row, column), in.up(row, column));
  });
  store_rows(t, at, to);
}

/// Three tiles as they arrive; a thread reads what it asked for itself.  Gate and up give way to
/// tiles that wait for their turn, the product's gradient to the exchange.
struct Arriving {
  Pack8 gate[kRows][kThreads], up[kRows][kThreads], d[kRows][kThreads];
};
static_assert(sizeof(TileExchange) <= sizeof(Arriving::d));

/// Read by one instruction.
__device__ Pack8 whole(const Pack8& x) {
  const uint4 bits = reinterpret_cast<const uint4&>(x);
  return reinterpret_cast<const Pack8&>(bits);
}
__device__ Tile waiting(const Pack8 (&of)[kRows][kThreads]) {
  Tile t;
#pragma unroll
  for (int i = 0; i < kRows; ++i) put(t, i, whole(of[i][threadIdx.x]));
  return t;
}

/// One CTA has the same columns of gate and of up, so that each value is read once and its
/// exponential taken once; registers hold one of the three tiles that come of it.  All loads are in
/// flight at once, two rows a group.  The width is a multiple of a tile's.
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(GateUp in, const Bf16* d_y, Fp8Target to_product, Fp8Target to_gradient) {
  await_earlier_work();
  extern __shared__ __align__(16) std::uint8_t shared[];
  auto& tiles = *reinterpret_cast<Arriving*>(shared);
  auto& exchange = *reinterpret_cast<TileExchange*>(tiles.d);
  const TilePlace at(blockIdx.x, blockIdx.y);
  const unsigned me = threadIdx.x;
  const Bf16 *gate_at = in.x + at.row0 * 2 * in.width + at.column0,
             *d_at = d_y + at.row0 * in.width + at.column0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::size_t zeros = at.row0 + i < to_product.rows ? 0 : sizeof(Pack8);
    __pipeline_memcpy_async(&tiles.gate[i][me], gate_at, sizeof(Pack8), zeros);
    __pipeline_memcpy_async(&tiles.up[i][me], gate_at + in.width, sizeof(Pack8), zeros);
    __pipeline_memcpy_async(&tiles.d[i][me], d_at, sizeof(Pack8), zeros);
    if (i % 2 == 1) __pipeline_commit();
    gate_at += 2 * in.width;
    d_at += in.width;
  }
  Tile d_gate;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i % 2 == 0) __pipeline_wait_prior((kRows - 2 - i) / 2);
    const Pack8 gate = whole(tiles.gate[i][me]), up = whole(tiles.up[i][me]),
                d = whole(tiles.d[i][me]);
    const SwigluGradients made = swiglu_gradients(gate, up, d);
    tiles.gate[i][me] = made.product;
    tiles.up[i][me] = made.d_up;
    put(d_gate, i, made.d_gate);
  }
  store_rows(d_gate, at, to_gradient);
  __syncthreads();  // all have read what lay where the exchange is
  store_columns(d_gate, at, to_gradient, exchange);
  __syncthreads();  // the exchange is free
  store_columns(waiting(tiles.gate), at, to_product, exchange);
  __syncthreads();
  const Tile d_up = waiting(tiles.up);
  const TilePlace beyond(blockIdx.x + gridDim.x, blockIdx.y);
  store_rows(d_up, beyond, to_gradient);
  store_columns(d_up, beyond, to_gradient, exchange);
}

}  // namespace

cudaError_t fp8_swiglu(const Bf16* gate_up, const Fp8Target& to, cudaStream_t stream) {
  launch(forward_kernel, dim3(tiles(to.width), tiles(to.rows)), kThreads, 0, stream,
         GateUp{gate_up, to.width}, to);
  return cudaGetLastError();
}

cudaError_t fp8_swiglu_backward(const Bf16* gate_up, const Bf16* d_y, const Fp8Target& to_product,
                                const Fp8Target& to_gradient, cudaStream_t stream) {
  if (to_product.width % kTile != 0) return cudaErrorInvalidValue;
  const cudaError_t allowed = cudaFuncSetAttribute(
      backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Arriving));
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(tiles(to_product.width), tiles(to_product.rows));
  launch(backward_kernel, grid, kThreads, sizeof(Arriving), stream,
         GateUp{gate_up, to_product.width}, d_y, to_product, to_gradient);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
