// What the sm_90 attention kernels share: how a producer thread walks the lists of an
// AttentionPattern and turns them into a stream of tiles, and how a consumer turns intervals, row
// masks and cover words into 64-bit masks.
#pragma once
#include <climits>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/runtime/hopper.cuh"

namespace ballast::cuda {

/// What a consumer warpgroup does with one 64 x 64 half of a tile.
enum HalfState : std::int8_t { kSkip = 0, kWhole = 1, kMasked = 2 };
inline constexpr int kNoMask = -1;  // BlockRun::row_mask of an unmasked run
inline constexpr int kAbsent = -2;  // this list does not contain the block
inline constexpr std::uint64_t kAllRows = ~0ull;
inline constexpr std::uint32_t kNoRow =
    0xFFFFFFFFu;  // of a tile of gathered rows: past the list's end

/// Cursor over the blocks of a sorted list of runs, clipped to [low, high).
struct RunCursor {
  const BlockRun* run;
  const BlockRun* stop;
  int low, high;
  int block, last, mask;

  __device__ void open(const BlockRun* first, const BlockRun* end, int low_, int high_) {
    run = first;
    stop = end;
    low = low_;
    high = high_;
    load();
  }
  /// A list that is the whole clip interval.
  __device__ void open_whole(int low_, int high_) {
    run = stop = nullptr;
    high = last = high_;
    mask = kNoMask;
    block = low_ < high_ ? low_ : INT_MAX;
  }
  __device__ void open_empty() {
    run = stop = nullptr;
    block = INT_MAX;
  }
  __device__ void pop() {
    if (++block >= last) load();
  }
  __device__ void load() {
    while (run != stop) {
      const int first = max(__ldg(&run->first), low);
      last = min(__ldg(&run->last), high);
      mask = __ldg(&run->row_mask);
      ++run;
      if (first < last) {
        block = first;
        return;
      }
    }
    block = INT_MAX;
  }
};

/// Key blocks that query block `qb` under index head `h` uses.
__device__ inline void open_query_block(RunCursor& cursor, const DeviceIndex& index, int h,
                                        int qb) {
  if (qb >= index.shape.q_blocks()) return cursor.open_empty();
  const BlockBounds b = index.bounds[qb];
  const int low = b.begin_first / kBlock, high = (b.end_last + kBlock - 1) / kBlock;
  if (index.shape.dense) return cursor.open_whole(low, high);
  const std::int64_t list = static_cast<std::int64_t>(h) * index.shape.q_blocks() + qb;
  cursor.open(index.runs + index.run_offset[list], index.runs + index.run_offset[list + 1], low,
              high);
}

/// Query blocks that use key block `kb` under index head `h`.
__device__ inline void open_key_block(RunCursor& cursor, const DeviceIndex& index, int h, int kb) {
  if (kb >= index.shape.k_blocks()) return cursor.open_empty();
  const Interval range = index.query_range[kb];
  if (index.shape.dense) return cursor.open_whole(range.begin, range.end);
  const std::int64_t list = static_cast<std::int64_t>(h) * index.shape.k_blocks() + kb;
  cursor.open(index.transposed + index.transposed_offset[list],
              index.transposed + index.transposed_offset[list + 1], range.begin, range.end);
}

/// How rows with bounds `b` see the keys [first, first + 64).
__device__ __forceinline__ HalfState visible_state(const BlockBounds& b, int first) {
  if (first >= b.end_last || first + kBlock <= b.begin_first) return kSkip;
  return first >= b.begin_last && first + kBlock <= b.end_first ? kWhole : kMasked;
}
/// Bounds of query block qb counted in the column list of index head h.
__device__ inline BlockBounds column_block_bounds(const DeviceIndex& index, int h, int qb) {
  const Interval* rows =
      index.column_bounds + (static_cast<std::int64_t>(h) * index.shape.q_blocks() + qb) * kBlock;
  const int last_row =
      min(kBlock, static_cast<int>(index.shape.q_tokens - static_cast<std::int64_t>(qb) * kBlock)) -
      1;
  return {rows[0].begin, rows[last_row].begin, rows[0].end, rows[last_row].end};
}
/// Columns of query block qb that runs already cover, among columns [64 group, 64 group + 64) of
/// its list.
__device__ __forceinline__ std::uint64_t cover_word(const DeviceIndex& index, int h, int qb,
                                                    int group) {
  return index
      .cover[index.cover_offset[static_cast<std::int64_t>(h) * index.shape.q_blocks() + qb] +
             group];
}

/// Bits [low, high) of a 64-bit word, both clamped to 0..64.
__device__ __forceinline__ std::uint64_t interval_bits(int low, int high) {
  low = min(max(low, 0), 64);
  high = min(max(high, 0), 64);
  const std::uint64_t below_high = high == 64 ? ~0ull : (1ull << high) - 1;
  const std::uint64_t below_low = low == 64 ? ~0ull : (1ull << low) - 1;
  return below_high & ~below_low;
}

/// Ring position: stage and phase parity.
template <int kStages>
struct RingPosition {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace ballast::cuda
