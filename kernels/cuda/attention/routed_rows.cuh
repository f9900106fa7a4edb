// What the sm_90 kernels over routed lists (kernels/cuda/index/routed_index.hpp) share: the claim
// of units of work, and query rows gathered from anywhere into the tiles that wgmma reads.
//
// The copy engine takes boxes of neighbouring rows only, so the producer warpgroup copies 16 bytes
// a thread by cp.async, to where the 128-byte swizzle expects them.
#pragma once
#include "kernels/cuda/attention/tiles.cuh"
#include "kernels/cuda/index/routed_index.hpp"
#include "kernels/cuda/runtime/hopper.cuh"

namespace ballast::cuda {
using namespace hopper;

inline constexpr int kRowProducers = 128;  // threads that gather

/// The units of the lists [first_list, last_list), cut into `parts` parts of their keys.
struct RoutedClaims {
  const RoutedUnit* units;
  const std::int64_t* unit_offset;
  int first_list, last_list, parts;
  int* counter;
  __device__ RoutedUnit next(int& part) const {
    const std::int64_t first = unit_offset[first_list],
                       count = (unit_offset[last_list] - first) * parts;
    const std::int64_t item = atomicAdd(counter, 1);
    part = static_cast<int>(item % parts);
    return item < count ? units[first + item / parts] : RoutedUnit{0, 0, 0, 0};
  }
};

/// [tokens, heads, head_dim] from the first head of a group on.
struct RowsOf {
  const __nv_bfloat16* base;
  std::int64_t stride;
};

__device__ __forceinline__ void copy_async(std::uint32_t smem, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global),
               "r"(there ? 16 : 0)
               : "memory");
}
/// The thread's copies are complete and visible to wgmma, once this and a barrier have passed.
__device__ __forceinline__ void copies_done() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  fence_async_proxy();
}

/// A warp copies kRows rows of D columns: row r, named by lane r's `entry`, to row `first` + r of a
/// swizzled tile of 64 rows.
template <int D, int kRows>
__device__ __forceinline__ void gather_rows(unsigned char* tile, int first, std::uint32_t entry,
                                            const RowsOf& from, int lane) {
  constexpr int kChunks = D / 8;  // of 16 bytes
  const int chunk = lane % kChunks;
  const std::uint32_t to = smem_address(tile) + chunk / 8 * (kBlock * 128);
#pragma unroll 4
  for (int i = 0; i < kRows; i += 32 / kChunks) {
    const int r = i + lane / kChunks, row = first + r;
    const std::uint32_t e = __shfl_sync(~0u, entry, r);
    const bool there = e != kNoRow;
    const std::int64_t at =
        there ? static_cast<std::int64_t>(e >> 4) * from.stride + (e & 15) * D : 0;
    copy_async(to + row * 128 + ((chunk % 8 ^ row % 8) << 4), from.base + at + chunk * 8, there);
  }
}

}  // namespace ballast::cuda
