// SwiGLU whose results are rounded to E4M3 where they are made.
#include "kernels/cuda/ops/fp8_tile.cuh"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/swiglu.cuh"

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

__global__ void __launch_bounds__(kThreads, 3) forward_kernel(GateUp in, Bf16* y, Fp8Target to) {
  const TilePlace at(blockIdx.x, blockIdx.y);
  const Tile t = load_tile(at, to.rows, to.width, [=](std::int64_t row, std::int64_t column) {
    const Pack8 product = swiglu_of(in.gate(row, column), in.up(row, column));
    *reinterpret_cast<Pack8*>(y + row * to.width + column) = product;
    return product;
  });
  store_rows(t, at, to);
}

/// Tiles that wait for their turn: a thread reads what it wrote itself.
struct WaitingTiles {
  Pack8 product[kRows][kThreads], d_up[kRows][kThreads];
};
constexpr std::size_t kSharedBytes = sizeof(WaitingTiles) + sizeof(TileExchange);

__device__ Tile waiting(const Pack8 (&of)[kRows][kThreads]) {
  Tile t;
#pragma unroll
  for (int i = 0; i < kRows; ++i) put(t, i, of[i][threadIdx.x]);
  return t;
}

/// One CTA has the same columns of gate and of up, so that each value is read once and its
/// exponential taken once; registers hold one of the three tiles that come of it.  The width is a
/// multiple of a tile's.
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(GateUp in, const Bf16* d_y, Fp8Target to_product, Fp8Target to_gradient) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  auto& wait = *reinterpret_cast<WaitingTiles*>(shared);
  auto& exchange = *reinterpret_cast<TileExchange*>(shared + sizeof(WaitingTiles));
  const TilePlace at(blockIdx.x, blockIdx.y);
  Tile d_gate;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i % 2 == 0) __syncwarp();  // loads of more rows at once would spill
    Pack8 gate{}, up{}, d{};
    if (const std::int64_t row = at.row0 + i; row < to_product.rows) {
      gate = in.gate(row, at.column0);
      up = in.up(row, at.column0);
      d = *reinterpret_cast<const Pack8*>(d_y + row * in.width + at.column0);
    }
    const SwigluGradients made = swiglu_gradients(gate, up, d);
    wait.product[i][threadIdx.x] = made.product;
    wait.d_up[i][threadIdx.x] = made.d_up;
    put(d_gate, i, made.d_gate);
  }
  store_rows(d_gate, at, to_gradient);
  store_columns(d_gate, at, to_gradient, exchange);
  __syncthreads();  // the exchange is free
  store_columns(waiting(wait.product), at, to_product, exchange);
  __syncthreads();
  const Tile d_up = waiting(wait.d_up);
  const TilePlace beyond(blockIdx.x + gridDim.x, blockIdx.y);
  store_rows(d_up, beyond, to_gradient);
  store_columns(d_up, beyond, to_gradient, exchange);
}

}  // namespace

cudaError_t fp8_swiglu(const Bf16* gate_up, Bf16* y, const Fp8Target& to, cudaStream_t stream) {
  forward_kernel<<<dim3(tiles(to.width), tiles(to.rows)), kThreads, 0, stream>>>(
      GateUp{gate_up, to.width}, y, to);
  return cudaGetLastError();
}

cudaError_t fp8_swiglu_backward(const Bf16* gate_up, const Bf16* d_y, const Fp8Target& to_product,
                                const Fp8Target& to_gradient, cudaStream_t stream) {
  if (to_product.width % kTile != 0) return cudaErrorInvalidValue;
  const cudaError_t allowed = cudaFuncSetAttribute(
      backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(tiles(to_product.width), tiles(to_product.rows));
  backward_kernel<<<grid, kThreads, kSharedBytes, stream>>>(GateUp{gate_up, to_product.width}, d_y,
                                                            to_product, to_gradient);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
