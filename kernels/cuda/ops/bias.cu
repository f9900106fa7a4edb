// Biases, their gradients, and sums over parts that blocks of threads left.
#include "kernels/cuda/ops/fp8_tile.cuh"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/launch.cuh"

namespace ballast::cuda {
namespace {

constexpr int kPartLanes = 32;

__device__ void put(const GradientOut& out, std::int64_t i, float sum) {
  if (out.is_float) {
    float& x = static_cast<float*>(out.at)[i];
    x = out.accumulate ? x + sum : sum;
  } else {
    Bf16& x = static_cast<Bf16*>(out.at)[i];
    x = __float2bfloat16_rn(out.accumulate ? __bfloat162float(x) + sum : sum);
  }
}

// out takes the sum of the parts: 32 columns a block, each by kPartLanes threads that take every
// kPartLanes-th part, then by one that adds those up.
__global__ void __launch_bounds__(32 * kPartLanes)
    add_partials_kernel(const float* partial, GradientOut out, std::int64_t columns, int parts) {
  await_earlier_work();
  __shared__ float sums[kPartLanes][32];
  const std::int64_t c = blockIdx.x * std::int64_t{32} + threadIdx.x;
  float total = 0;
  if (c < columns)
    for (int p = threadIdx.y; p < parts; p += kPartLanes) total += partial[p * columns + c];
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
  for (int lane = 1; lane < kPartLanes; ++lane) total += sums[lane][threadIdx.x];
  put(out, c, total);
}

/// Sums over tiles of 128 tokens: whoever makes a gradient a tile at a time sums it alike.
__global__ void __launch_bounds__(kThreads)
    bias_kernel(const Bf16* d_y, std::int64_t stride, float* partial, std::int64_t rows,
                std::int64_t columns) {
  await_earlier_work();
  __shared__ float scratch[kThreads / 32][kTile];
  const TilePlace at(blockIdx.x, blockIdx.y);
  const Tile t = load_tile(at, rows, columns, [=](std::int64_t row, std::int64_t column) {
    return *reinterpret_cast<const Pack8*>(d_y + row * stride + column);
  });
  store_sums(t, at, columns, scratch, partial + at.down * columns);
}

constexpr int kBiasThreads = 256;

__global__ void add_bias_kernel(Bf16* y, std::int64_t stride, const Bf16* bias, std::int64_t rows,
                                std::int64_t pairs) {
  await_earlier_work();
  const std::int64_t pair = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (pair >= pairs) return;
  const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(bias)[pair]);
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    auto* at = reinterpret_cast<__nv_bfloat162*>(y + row * stride) + pair;
    const float2 value = __bfloat1622float2(*at);
    *at = __floats2bfloat162_rn(value.x + b.x, value.y + b.y);
  }
}

}  // namespace

cudaError_t add_partials(const float* partial, const GradientOut& out, std::int64_t columns,
                         int parts, cudaStream_t stream) {
  launch(add_partials_kernel, static_cast<unsigned>((columns + 31) / 32), dim3(32, kPartLanes), 0,
         stream, partial, out, columns, parts);
  return cudaGetLastError();
}

std::size_t bias_partial_floats(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(tiles(rows)) * columns;
}

cudaError_t bias_gradient(const Bf16* d_y, std::int64_t row_stride, const GradientOut& d_bias,
                          float* partial, std::int64_t rows, std::int64_t columns,
                          cudaStream_t stream) {
  if (columns == 0) return cudaSuccess;
  if (columns % kColumns != 0 || row_stride % kColumns != 0) return cudaErrorInvalidValue;
  if (rows > 0)
    launch(bias_kernel, dim3(tiles(columns), tiles(rows)), kThreads, 0, stream, d_y, row_stride,
           partial, rows, columns);
  return add_partials(partial, d_bias, columns, static_cast<int>(tiles(rows)), stream);
}

cudaError_t add_bias(Bf16* y, std::int64_t stride, const Bf16* bias, std::int64_t rows,
                     std::int64_t width, cudaStream_t stream) {
  const std::int64_t pairs = width / 2;
  const dim3 grid(static_cast<unsigned>((pairs + kBiasThreads - 1) / kBiasThreads),
                  static_cast<unsigned>(rows < 4096 ? rows : 4096));
  launch(add_bias_kernel, grid, kBiasThreads, 0, stream, y, stride, bias, rows, pairs);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
