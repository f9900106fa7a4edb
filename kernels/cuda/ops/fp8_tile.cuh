// A tile of 128 x 128 bf16 values in the registers of a CTA, rounded to E4M3 as it lies and
// transposed: what the kernels that round share, wherever their values come from.
#pragma once
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {

inline constexpr int kTile = 128;     // rows and columns of a CTA's tile: a block of scales
inline constexpr int kThreads = 256;  // a thread has 8 rows by 8 columns
inline constexpr int kRows = 8;
inline constexpr int kColumns = 8;

inline unsigned tiles(std::int64_t n) { return static_cast<unsigned>((n + kTile - 1) / kTile); }

/// What a block's largest magnitude, as bf16 bits, makes of it (kernels/ops/fp8.hpp).  Bits of |x|
/// order like magnitudes, NaN above all.
struct BlockScale {
  float scale;
  unsigned inverse;  ///< bf16 bits of 1 / scale, a power of two as well; NaN for what is not finite
  __device__ explicit BlockScale(unsigned bits) {
    const int exponent = static_cast<int>(bits >> 7);
    const int power = exponent - 8 + ((bits & 0x7fu) > 0x60u ? 1 : 0);
    const bool one = bits == 0 || exponent == 255;
    const unsigned biased = one ? 127 : max(power, 1);
    scale = __uint_as_float(biased << 23);
    inverse = exponent == 255 ? 0x7fffu : (254 - biased) << 7;
  }
};
/// One inverse for both values of a word, and one for each.
__device__ inline unsigned both(unsigned inverse) { return inverse * 0x10001u; }
__device__ inline unsigned each(unsigned low, unsigned high) { return low | high << 16; }

/// Two bf16 values times powers of two, which is exact.
__device__ inline unsigned scaled(unsigned pair, unsigned inverses) {
  const __nv_bfloat162 y = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair),
                                   reinterpret_cast<const __nv_bfloat162&>(inverses));
  return reinterpret_cast<const unsigned&>(y);
}
__device__ inline float low_value(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_value(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

/// Scaled values, at most 448 or NaN, as bytes, the first one low.
__device__ inline unsigned two_bytes(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
__device__ inline unsigned four_bytes(float a, float b, float c, float d) {
  return two_bytes(a, b) | two_bytes(c, d) << 16;
}

/// This thread's part of a tile.
struct Tile {
  unsigned pairs[kRows][kColumns / 2];  ///< [row][two columns], bf16 bits
};

/// Where a tile lies: rows 8 (thread / 16) + i and columns 8 (thread % 16) + j are this thread's.
struct TilePlace {
  std::int64_t across, down;  ///< in tiles
  std::int64_t row0, column0;
  __device__ TilePlace(unsigned x, unsigned y)
      : across(x),
        down(y),
        row0(y * std::int64_t{kTile} + threadIdx.x / 16 * kRows),
        column0(x * std::int64_t{kTile} + threadIdx.x % 16 * kColumns) {}
};

/// Values of row i.
__device__ inline void put(Tile& t, int i, const Pack8& eight) {
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p)
    t.pairs[i][p] = reinterpret_cast<const unsigned&>(eight.v[p]);
}

/// value(row, column) gives eight neighbours of a row as a Pack8; zero outside.
template <class Value>
__device__ Tile load_tile(const TilePlace& at, std::int64_t rows, std::int64_t width,
                          const Value& value) {
  Tile t;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Pack8 eight{};
    if (at.row0 + i < rows && at.column0 < width) eight = value(at.row0 + i, at.column0);
    put(t, i, eight);
  }
  return t;
}

/// Largest magnitudes of a row's even columns (low half) and odd ones.
__device__ inline unsigned row_magnitudes(const Tile& t, int i) {
  unsigned most = 0;
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p) most = __vmaxu2(most, t.pairs[i][p] & 0x7fff7fffu);
  return most;
}

/// The bytes of eight neighbours of a row.
__device__ inline uint2 rounded_row(const unsigned (&pairs)[kColumns / 2], unsigned inverse) {
  unsigned x[kColumns / 2];
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p) x[p] = scaled(pairs[p], both(inverse));
  return make_uint2(
      four_bytes(low_value(x[0]), high_value(x[0]), low_value(x[1]), high_value(x[1])),
      four_bytes(low_value(x[2]), high_value(x[2]), low_value(x[3]), high_value(x[3])));
}

/// Rounds by rows and writes bytes and scales.
__device__ inline void store_rows(const Tile& t, const TilePlace& at, const Fp8Target& to) {
#pragma unroll
  for (int i = 0; i < kRows; i += 2) {
    // Two rows at a time, in the halves of a word.
    const unsigned a = row_magnitudes(t, i), b = row_magnitudes(t, i + 1);
    unsigned most = __vmaxu2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
      most = __vmaxu2(most, __shfl_xor_sync(0xffffffffu, most, offset));
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const BlockScale block(k == 0 ? most & 0xffffu : most >> 16);
      const std::int64_t row = at.row0 + i + k;
      if (row >= to.rows_padded) continue;
      if (at.column0 < to.width)
        *reinterpret_cast<uint2*>(to.bytes + row * to.width + at.column0) =
            rounded_row(t.pairs[i + k], block.inverse);
      if (threadIdx.x % 16 == 0) to.scales[at.across * to.rows_padded + row] = block.scale;
    }
  }
}

/// Rounds by rows where 16 neighbouring lanes have a block of a row, eight values each: `eight` are
/// the values of pack `pack` of `row`, zero and not `inside` beyond the target's bytes.  The whole
/// warp calls it.
__device__ inline void store_block(const Pack8& eight, bool inside, std::int64_t row, int pack,
                                   const Fp8Target& to) {
  unsigned pairs[kColumns / 2], most = 0;
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p) {
    pairs[p] = reinterpret_cast<const unsigned&>(eight.v[p]);
    most = __vmaxu2(most, pairs[p] & 0x7fff7fffu);
  }
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2)
    most = __vmaxu2(most, __shfl_xor_sync(0xffffffffu, most, offset));
  if (!inside) return;
  const BlockScale block(max(most & 0xffffu, most >> 16));
  *reinterpret_cast<uint2*>(to.bytes + row * to.width + pack * kColumns) =
      rounded_row(pairs, block.inverse);
  if (threadIdx.x % 16 == 0) to.scales[pack / 16 * to.rows_padded + row] = block.scale;
}

/// What the threads of a CTA tell each other about one tile.
struct TileExchange {
  uint4 largest[kThreads / 32][kTile / kColumns];  ///< [warp][eight columns], two a word
  /// [column][eight rows]; groups of eight rows change places by column, so that the 16 threads of
  /// a group meet no bank twice.
  uint2 turned[kTile][kTile / kRows];
};

/// Largest magnitudes of the tile's columns, for this thread's eight, two a word.
__device__ inline void column_magnitudes(const Tile& t, TileExchange& exchange,
                                         unsigned (&most)[kColumns / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = threadIdx.x % 16;
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p) {
    most[p] = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) most[p] = __vmaxu2(most[p], t.pairs[i][p] & 0x7fff7fffu);
    most[p] = __vmaxu2(most[p], __shfl_xor_sync(0xffffffffu, most[p], 16));
  }
  if (lane < 16) exchange.largest[warp][c] = make_uint4(most[0], most[1], most[2], most[3]);
  __syncthreads();
#pragma unroll 4
  for (int w = 0; w < kThreads / 32; ++w) {
    const uint4 x = exchange.largest[w][c];
    most[0] = __vmaxu2(most[0], x.x), most[1] = __vmaxu2(most[1], x.y);
    most[2] = __vmaxu2(most[2], x.z), most[3] = __vmaxu2(most[3], x.w);
  }
}

/// This thread's eight rows of its columns 2 p and 2 p + 1, times these inverses.
__device__ inline void turn_columns(const Tile& t, int p, unsigned inverses,
                                    TileExchange& exchange) {
  unsigned x[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) x[i] = scaled(t.pairs[i][p], inverses);
  const int group = threadIdx.x / 16, c = threadIdx.x % 16;
  exchange.turned[c * kColumns + 2 * p][group ^ c] =
      make_uint2(four_bytes(low_value(x[0]), low_value(x[1]), low_value(x[2]), low_value(x[3])),
                 four_bytes(low_value(x[4]), low_value(x[5]), low_value(x[6]), low_value(x[7])));
  exchange.turned[c * kColumns + 2 * p + 1][group ^ c] = make_uint2(
      four_bytes(high_value(x[0]), high_value(x[1]), high_value(x[2]), high_value(x[3])),
      four_bytes(high_value(x[4]), high_value(x[5]), high_value(x[6]), high_value(x[7])));
}

/// Writes the turned tile as rows of `out` [width, row_end], `stride` bytes apart.
__device__ inline void store_turned(const TileExchange& exchange, const TilePlace& at,
                                    std::uint8_t* out, std::int64_t stride, std::int64_t width,
                                    std::int64_t row_end) {
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * 8; i += kThreads) {
    const int column = i / 8, sixteen = i % 8, c = column / kColumns;
    // Two groups that lie side by side, changed places or not.
    uint4 x = *reinterpret_cast<const uint4*>(&exchange.turned[column][2 * (sixteen ^ c / 2)]);
    if (c % 2 == 1) x = make_uint4(x.z, x.w, x.x, x.y);
    const std::int64_t to = at.across * kTile + column, row = at.down * kTile + sixteen * 16;
    if (to < width && row < row_end) *reinterpret_cast<uint4*>(out + to * stride + row) = x;
  }
}

/// Rounds by columns and writes the bytes transposed, with their scales.
__device__ inline void store_columns(const Tile& t, const TilePlace& at, const Fp8Target& to,
                                     TileExchange& exchange) {
  unsigned most[kColumns / 2];
  column_magnitudes(t, exchange, most);
#pragma unroll
  for (int p = 0; p < kColumns / 2; ++p) {
    const BlockScale low(most[p] & 0xffffu), high(most[p] >> 16);
    turn_columns(t, p, each(low.inverse, high.inverse), exchange);
    if (threadIdx.x / 16 == 0 && at.column0 < to.width)
      *reinterpret_cast<float2*>(to.transposed_scales + at.down * to.width + at.column0 + 2 * p) =
          make_float2(low.scale, high.scale);
  }
  store_turned(exchange, at, to.transposed, to.columns_padded, to.width, to.columns_padded);
}

/// Sums over the tile's rows, in a fixed order, to `sums` [width].
__device__ inline void store_sums(const Tile& t, const TilePlace& at, std::int64_t width,
                                  float (&scratch)[kThreads / 32][kTile], float* sums) {
  float total[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    total[j] = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      total[j] += j % 2 == 0 ? low_value(t.pairs[i][j / 2]) : high_value(t.pairs[i][j / 2]);
    total[j] += __shfl_xor_sync(0xffffffffu, total[j], 16);
  }
  if (threadIdx.x % 32 < 16)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)  // neighbouring lanes in neighbouring banks
      scratch[threadIdx.x / 32][j * 16 + threadIdx.x % 16] = total[j];
  __syncthreads();
  const std::int64_t column = at.across * kTile + threadIdx.x;
  if (threadIdx.x >= kTile || column >= width) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w)
    sum += scratch[w][threadIdx.x % kColumns * 16 + threadIdx.x / kColumns];
  sums[column] = sum;
}

}  // namespace ballast::cuda
