// 64 x 64 products of bf16 rows by the warp instruction mma.m16n8k16 (sm_80 on): what the pattern
// builders score with.  The dot product of a pair is one fixed chain of sixteen-wide steps, so it
// does not depend on tiles or ranks.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/runtime/head_dims.hpp"

namespace ballast::cuda {

/// Columns of a row that shared memory holds at a time.
constexpr int product_columns(int head_dim) { return head_dim > 128 ? 128 : head_dim; }

inline constexpr int kProductThreads = 128;  ///< warp w computes rows [16 w, 16 w + 16)

/// acc += a b for one step of 16: a four registers, b two, in the instruction's own layout.
__device__ __forceinline__ void mma_step(float (&acc)[4], std::uint32_t a0, std::uint32_t a1,
                                         std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                         std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int D>
struct Tile {
  static constexpr int kStride = D + 8;  // elements; the pad spreads rows over the banks
  __nv_bfloat16 row[kBlock * kStride];

  /// 64 rows from global memory; rows from `rows` on are zero.
  __device__ void load(const __nv_bfloat16* from, std::int64_t stride, int rows) {
    for (int i = threadIdx.x; i < kBlock * D / 2; i += kProductThreads) {
      const int r = i / (D / 2), c = 2 * (i % (D / 2));
      const std::uint32_t pair =
          r < rows ? *reinterpret_cast<const std::uint32_t*>(from + r * stride + c) : 0;
      *reinterpret_cast<std::uint32_t*>(row + r * kStride + c) = pair;
    }
  }
  __device__ std::uint32_t pair(int r, int c) const {
    return *reinterpret_cast<const std::uint32_t*>(row + r * kStride + c);
  }
};

/// acc[j][e] of lane l += a[16 warp + l / 4 + 8 (e / 2)] . b[8 j + 2 (l % 4) + e % 2].
template <int D>
__device__ void add_product(float (&acc)[8][4], const Tile<D>& a, const Tile<D>& b) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4,
            column = 2 * (lane % 4);
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    const std::uint32_t a0 = a.pair(row, k + column), a1 = a.pair(row + 8, k + column);
    const std::uint32_t a2 = a.pair(row, k + column + 8), a3 = a.pair(row + 8, k + column + 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t b0 = b.pair(8 * j + lane / 4, k + column),
                          b1 = b.pair(8 * j + lane / 4, k + column + 8);
      mma_step(acc[j], a0, a1, a2, a3, b0, b1);
    }
  }
}

}  // namespace ballast::cuda
