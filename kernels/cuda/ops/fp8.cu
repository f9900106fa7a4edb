// Rounding to E4M3: one pass over bf16 writes the bytes as they lie and transposed, each with the
// scales of its blocks.
#include <cuda_fp8.h>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kTile = 128;     // rows and columns of a CTA's tile: a block of scales
constexpr int kThreads = 256;  // a thread has 8 rows by 8 columns
constexpr int kEach = 8;

/// Bits of |x|, which order like magnitudes, NaN above all.
__device__ unsigned magnitude(unsigned bits) { return bits & 0x7fffu; }

/// The scale for a largest magnitude of these bf16 bits (kernels/ops/fp8.hpp).
__device__ float scale_of(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 7);
  if (bits == 0 || exponent == 255) return 1.0f;
  const int power = exponent - 127 - 8 + ((bits & 0x7fu) > 0x60u ? 1 : 0);
  return __int_as_float((max(power, -126) + 127) << 23);
}
/// 1 / scale, a power of two as well.
__device__ float inverse_of(float scale) {
  return __int_as_float((254 << 23) - __float_as_int(scale));
}

__device__ unsigned rounded(unsigned bits, float inverse) {
  const float x = __uint_as_float(bits << 16) * inverse;
  if (!(fabsf(x) <= 448.0f)) return 0x7fu;  // NaN
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

struct Tile {
  unsigned pairs[kEach][kEach / 2];  ///< [row][two columns], bf16 bits
  __device__ unsigned bits(int row, int column) const {
    const unsigned pair = pairs[row][column / 2];
    return column % 2 == 0 ? pair & 0xffffu : pair >> 16;
  }
};

/// Rows 8 (thread / 16) + i and columns 8 (thread % 16) + j of the tile; zero outside.
__device__ Tile load_tile(const Bf16* x, std::int64_t stride, std::int64_t rows, std::int64_t width,
                          std::int64_t row0, std::int64_t column0) {
  Tile t;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (row0 + i < rows && column0 < width)
      raw = *reinterpret_cast<const uint4*>(x + (row0 + i) * stride + column0);
    t.pairs[i][0] = raw.x, t.pairs[i][1] = raw.y, t.pairs[i][2] = raw.z, t.pairs[i][3] = raw.w;
  }
  return t;
}

__device__ uint2 pack(const unsigned (&bytes)[kEach]) {
  return make_uint2(bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24,
                    bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24);
}

/// Largest magnitude of each of the tile's columns, for this thread's eight.
__device__ void column_magnitudes(const Tile& t, unsigned (&largest)[kEach],
                                  unsigned (*shared)[kTile]) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) most = max(most, magnitude(t.bits(i, j)));
    largest[j] = max(most, __shfl_xor_sync(0xffffffffu, most, 16));
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < 16)
#pragma unroll
    for (int j = 0; j < kEach; ++j) shared[warp][lane * kEach + j] = largest[j];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    unsigned most = 0;
    for (int w = 0; w < kThreads / 32; ++w) most = max(most, shared[w][lane % 16 * kEach + j]);
    largest[j] = most;
  }
}

/// Where a tile is turned: [column][eight rows].
using Turned = uint2[kTile][16];

/// This thread's eight rows of its column j.  Groups of eight rows change places by column, so that
/// the 16 threads of a group meet no bank twice.
__device__ void turn(Turned& turned, int j, uint2 bytes) {
  const int group = threadIdx.x / 16, c = threadIdx.x % 16;
  turned[c * kEach + j][group ^ c] = bytes;
}

/// Writes the turned tile as rows of `out`, `stride` bytes apart.
__device__ void store_turned(const Turned& turned, std::uint8_t* out, std::int64_t stride,
                             std::int64_t column0, std::int64_t width, std::int64_t row0,
                             std::int64_t row_end) {
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * 8; i += kThreads) {
    const int column = i / 8, pair = i % 8 * 2, swap = column / kEach;
    const uint2 low = turned[column][pair ^ swap], high = turned[column][(pair + 1) ^ swap];
    if (column0 + column < width && row0 + pair * 8 < row_end)
      *reinterpret_cast<uint4*>(out + (column0 + column) * stride + row0 + pair * 8) =
          make_uint4(low.x, low.y, high.x, high.y);
  }
}

/// Both sides at once need the tile unpacked through two phases: 2.6 TB/s on an H200 with two CTAs
/// a multiprocessor, 2.5 where a third fits because the tile is loaded again.
template <bool kRows, bool kColumns, int kResident = kRows == kColumns ? 2 : 3>
__global__ void __launch_bounds__(kThreads, kResident) round_kernel(Fp8Rounding r) {
  __shared__ unsigned largest_of[kColumns ? kThreads / 32 : 1][kTile];
  const int group = threadIdx.x / 16, c = threadIdx.x % 16;
  const std::int64_t tile_row = blockIdx.y * std::int64_t{kTile},
                     tile_column = blockIdx.x * std::int64_t{kTile},
                     row0 = tile_row + group * kEach, column0 = tile_column + c * kEach;
  Tile t = load_tile(r.x, r.stride, r.rows, r.width, row0, column0);
  if constexpr (kRows) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      unsigned most = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) most = max(most, magnitude(t.bits(i, j)));
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
      const float scale = scale_of(most), inverse = inverse_of(scale);
      unsigned bytes[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) bytes[j] = rounded(t.bits(i, j), inverse);
      if (row0 + i >= r.rows_padded) continue;
      if (column0 < r.width)
        *reinterpret_cast<uint2*>(r.bytes + (row0 + i) * r.width + column0) = pack(bytes);
      if (c == 0) r.scales[blockIdx.x * r.rows_padded + row0 + i] = scale;
    }
  }
  if constexpr (kColumns) {
    unsigned largest[kEach];
    column_magnitudes(t, largest, largest_of);
    __shared__ Turned turned;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float scale = scale_of(largest[j]), inverse = inverse_of(scale);
      unsigned bytes[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) bytes[i] = rounded(t.bits(i, j), inverse);
      turn(turned, j, pack(bytes));
      if (group == 0 && column0 + j < r.width)
        r.transposed_scales[blockIdx.y * r.width + column0 + j] = scale;
    }
    store_turned(turned, r.transposed, r.columns_padded, tile_column, r.width, tile_row,
                 r.columns_padded);
  }
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
  __shared__ unsigned largest_of[kThreads / 32];
  __shared__ Turned turned;
  const int group = threadIdx.x / 16, c = threadIdx.x % 16;
  const std::int64_t tile_row = blockIdx.y * std::int64_t{kTile},
                     tile_column = blockIdx.x * std::int64_t{kTile},
                     row0 = tile_row + group * kEach, column0 = tile_column + c * kEach;
  Tile t = load_tile(r.x, r.stride, r.out, r.in, row0, column0);
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) most = max(most, magnitude(t.bits(i, j)));
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = most;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) most = max(most, largest_of[w]);
  const float scale = scale_of(most), inverse = inverse_of(scale);
  unsigned bytes[kEach][kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) bytes[i][j] = rounded(t.bits(i, j), inverse);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (row0 + i < r.out && column0 < r.in)
      *reinterpret_cast<uint2*>(r.bytes + (row0 + i) * r.in + column0) = pack(bytes[i]);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    unsigned column[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) column[i] = bytes[i][j];
    turn(turned, j, pack(column));
  }
  if (threadIdx.x == 0) {
    const std::int64_t across = (gridDim.x + 3) / 4 * 4, down = (gridDim.y + 3) / 4 * 4;
    r.scales[blockIdx.y * across + blockIdx.x] = scale;
    r.transposed_scales[blockIdx.x * down + blockIdx.y] = scale;
  }
  store_turned(turned, r.transposed, r.out, tile_column, r.in, tile_row, r.out);
}

__global__ void add_bias_kernel(Bf16* y, std::int64_t stride, const Bf16* bias, std::int64_t rows,
                                std::int64_t pairs) {
  const std::int64_t pair = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (pair >= pairs) return;
  const float2 b = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(bias)[pair]);
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    auto* at = reinterpret_cast<__nv_bfloat162*>(y + row * stride) + pair;
    const float2 value = __bfloat1622float2(*at);
    *at = __floats2bfloat162_rn(value.x + b.x, value.y + b.y);
  }
}

unsigned tiles(std::int64_t n) { return static_cast<unsigned>((n + kTile - 1) / kTile); }

}  // namespace

cudaError_t fp8_round(const Fp8Rounding& r, cudaStream_t stream) {
  const dim3 grid(tiles(r.width), tiles(r.rows));
  if (r.bytes != nullptr && r.transposed != nullptr)
    round_kernel<true, true><<<grid, kThreads, 0, stream>>>(r);
  else if (r.bytes != nullptr)
    round_kernel<true, false><<<grid, kThreads, 0, stream>>>(r);
  else
    round_kernel<false, true><<<grid, kThreads, 0, stream>>>(r);
  return cudaGetLastError();
}

cudaError_t fp8_round_weight(const Bf16* weight, std::int64_t stride, std::int64_t out,
                             std::int64_t in, std::uint8_t* bytes, float* scales,
                             std::uint8_t* transposed, float* transposed_scales,
                             cudaStream_t stream) {
  const WeightRounding r{weight, stride, out, in, bytes, scales, transposed, transposed_scales};
  round_weight_kernel<<<dim3(tiles(in), tiles(out)), kThreads, 0, stream>>>(r);
  return cudaGetLastError();
}

cudaError_t add_bias(Bf16* y, std::int64_t stride, const Bf16* bias, std::int64_t rows,
                     std::int64_t width, cudaStream_t stream) {
  const std::int64_t pairs = width / 2;
  const dim3 grid(static_cast<unsigned>((pairs + kThreads - 1) / kThreads),
                  static_cast<unsigned>(rows < 4096 ? rows : 4096));
  add_bias_kernel<<<grid, kThreads, 0, stream>>>(y, stride, bias, rows, pairs);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
