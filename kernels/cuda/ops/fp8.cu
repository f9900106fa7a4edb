// Rounding to E4M3: one pass over bf16 writes the bytes as they lie and transposed, each with the
// scales of its blocks.
#include "kernels/cuda/ops/fp8_tile.cuh"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/launch.cuh"

namespace ballast::cuda {
namespace {

template <bool kByRows, bool kByColumns>
__global__ void __launch_bounds__(kThreads, 3)
    round_kernel(const Bf16* x, std::int64_t stride, Fp8Target to) {
  await_earlier_work();
  __shared__ TileExchange exchange;
  const TilePlace at(blockIdx.x, blockIdx.y);
  const Tile t = load_tile(at, to.rows, to.width, [=](std::int64_t row, std::int64_t column) {
    return *reinterpret_cast<const Pack8*>(x + row * stride + column);
  });
  if constexpr (kByRows) store_rows(t, at, to);
  if constexpr (kByColumns) store_columns(t, at, to, exchange);
}

struct WeightRounding {
  const Bf16* x;
  std::int64_t stride, out, in;
  std::uint8_t* bytes;
  float* scales;
  std::uint8_t* transposed;
  float* transposed_scales;
};

__global__ void __launch_bounds__(kThreads) round_weight_kernel(WeightRounding r) {
  await_earlier_work();
  __shared__ unsigned largest_of[kThreads / 32];
  __shared__ TileExchange exchange;
  const TilePlace at(blockIdx.x, blockIdx.y);
  const Tile t = load_tile(at, r.out, r.in, [=](std::int64_t row, std::int64_t column) {
    return *reinterpret_cast<const Pack8*>(r.x + row * r.stride + column);
  });
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) most = __vmaxu2(most, row_magnitudes(t, i));
  most = __reduce_max_sync(0xffffffffu, max(most & 0xffffu, most >> 16));
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = most;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) most = max(most, largest_of[w]);
  const BlockScale block(most);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (at.row0 + i < r.out && at.column0 < r.in)
      *reinterpret_cast<uint2*>(r.bytes + (at.row0 + i) * r.in + at.column0) =
          rounded_row(t.pairs[i], block.inverse);
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p) turn_columns(t, p, both(block.inverse), exchange);
  if (threadIdx.x == 0) {
    const std::int64_t across = (gridDim.x + 3) / 4 * 4, down = (gridDim.y + 3) / 4 * 4;
    r.scales[blockIdx.y * across + blockIdx.x] = block.scale;
    r.transposed_scales[blockIdx.x * down + blockIdx.y] = block.scale;
  }
  store_turned(exchange, at, r.transposed, r.out, r.in, r.out);
}

}  // namespace

cudaError_t fp8_round(const Bf16* x, std::int64_t stride, const Fp8Target& to,
                      cudaStream_t stream) {
  const dim3 grid(tiles(to.width), tiles(to.rows));
  if (to.bytes != nullptr && to.transposed != nullptr)
    launch(round_kernel<true, true>, grid, kThreads, 0, stream, x, stride, to);
  else if (to.bytes != nullptr)
    launch(round_kernel<true, false>, grid, kThreads, 0, stream, x, stride, to);
  else
    launch(round_kernel<false, true>, grid, kThreads, 0, stream, x, stride, to);
  return cudaGetLastError();
}

cudaError_t fp8_round_weight(const Bf16* weight, std::int64_t stride, std::int64_t out,
                             std::int64_t in, std::uint8_t* bytes, float* scales,
                             std::uint8_t* transposed, float* transposed_scales,
                             cudaStream_t stream) {
  const WeightRounding r{weight, stride, out, in, bytes, scales, transposed, transposed_scales};
  launch(round_weight_kernel, dim3(tiles(in), tiles(out)), kThreads, 0, stream, r);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
