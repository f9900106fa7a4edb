// From chosen slashes and columns to the arrays of a DeviceIndex (attention_pattern.hpp).  A warp
// walks the shard's key blocks of one query block and head, 32 at a time, and asks a bitmap whether
// their diagonals were chosen.
#include <algorithm>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/lists.cuh"
#include "kernels/cuda/index/slash_launch.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;

struct BuildParams {
  DeviceIndex index;
  PatternAxes axes;
  PatternLists slashes, columns;
  BlockLists blocks;
  std::uint32_t*
      chosen;  ///< [heads, bitmap_words] bit segment_slot[s] + d: diagonal d of segment s
  int bitmap_words;
  int cover_stride;  ///< cover words a (head, query block)
};

__device__ int warp_of_grid() {
  return static_cast<int>((static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32);
}

/// Query block b under head h: where it lies, and what it computes.
struct QueryBlockView {
  const std::uint32_t* chosen;
  const std::uint64_t* words = nullptr;  // of a head that goes by blocks
  int slot, base;  // slot of the block, -1 for padding; first slot of its segment
  __device__ QueryBlockView(const BuildParams& p, int h, int b)
      : chosen(p.chosen + static_cast<std::int64_t>(h) * p.bitmap_words) {
    slot = p.axes.query_slot[b];
    base = slot < 0 ? 0 : p.axes.segment_slot[p.axes.slot_segment[slot]];
    if (slot >= 0 && p.blocks.by_blocks != nullptr &&
        p.blocks.by_blocks[static_cast<std::int64_t>(h) * p.axes.slots + base] != 0)
      words = p.blocks.words + (h * p.index.shape.q_blocks() + b) * p.blocks.width;
  }
  /// Whether the key block of `key_slot`, of the same segment, is computed whole.
  __device__ bool computes(int key_slot) const {
    if (key_slot > slot) return false;
    if (words != nullptr) return words[key_slot - base] != 0;
    const int bit = base + slot - key_slot;
    return key_slot == base || (chosen[bit / 32] >> (bit % 32) & 1);
  }
};

__global__ void mark_slashes_kernel(const BuildParams p) {
  const int list = static_cast<int>(blockIdx.x), h = list / p.axes.segments,
            s = list % p.axes.segments;
  const int base = p.axes.segment_slot[s];
  const std::int32_t* entries =
      p.slashes.entries + static_cast<std::int64_t>(p.slashes.width) *
                              (static_cast<std::int64_t>(h) * p.axes.slots + base);
  for (int i = threadIdx.x; i < p.slashes.counts[list]; i += blockDim.x) {
    const int bit = base + entries[i];
    atomicOr(p.chosen + static_cast<std::int64_t>(h) * p.bitmap_words + bit / 32, 1u << (bit % 32));
  }
}

/// Runs of one (head, query block): counted when kFill is false, written when true.
template <bool kFill>
__global__ void runs_kernel(const BuildParams p) {
  const IndexShape& shape = p.index.shape;
  const int blocks = static_cast<int>(shape.q_blocks()), list = warp_of_grid();
  if (list >= blocks * shape.index_heads) return;
  const int h = list / blocks, b = list % blocks, lane = threadIdx.x % 32;
  const QueryBlockView view(p, h, b);
  const std::int64_t last_row = min(static_cast<std::int64_t>(b + 1) * kBlock, shape.q_tokens) - 1;
  const int low = p.index.key_begin[static_cast<std::int64_t>(b) * kBlock] / kBlock;
  const int high = view.slot < 0 ? low : (p.index.key_end[last_row] + kBlock - 1) / kBlock;
  const auto computed = [&](int kb) {
    return kb >= low && kb < high && view.computes(p.axes.key_slot[kb]);
  };
  const unsigned below = (1u << lane) - 1;
  std::int64_t starts = kFill ? p.index.run_offset[list] : 0, ends = starts;
  for (int base = low; base < high; base += 32) {
    const int kb = base + lane;
    const bool here = computed(kb), start = here && !computed(kb - 1),
               end = here && !computed(kb + 1);
    const unsigned start_mask = __ballot_sync(~0u, start), end_mask = __ballot_sync(~0u, end);
    if constexpr (kFill) {
      const std::int64_t s = starts + __popc(start_mask & below),
                         e = ends + __popc(end_mask & below);
      if (start && s < shape.runs) {
        p.index.runs[s].first = kb;
        p.index.runs[s].row_mask = -1;
      }
      if (end && e < shape.runs) p.index.runs[e].last = kb + 1;
    }
    starts += __popc(start_mask);
    ends += __popc(end_mask);
  }
  if (!kFill && lane == 0) p.index.run_offset[list + 1] = starts;
}

/// The chosen columns of one (head, segment) that are on the shard: counted, or written.  One warp
/// a list.
template <bool kFill>
__global__ void columns_kernel(const BuildParams p) {
  const int list = static_cast<int>(blockIdx.x), h = list / p.axes.segments,
            s = list % p.axes.segments, lane = static_cast<int>(threadIdx.x);
  const int base = p.axes.segment_slot[s];
  const std::int32_t* entries =
      p.columns.entries + static_cast<std::int64_t>(p.columns.width) *
                              (static_cast<std::int64_t>(h) * p.axes.slots + base);
  const int n = p.columns.counts[list];
  std::int64_t at = kFill ? p.index.column_offset[list] : 0;
  for (int first = 0; first < n; first += 32) {
    const int column = first + lane < n ? entries[first + lane] : 0;
    const int block = first + lane < n ? p.axes.slot_key[base + column / kBlock] : -1;
    const unsigned mask = __ballot_sync(~0u, block >= 0);
    const std::int64_t to = at + __popc(mask & ((1u << lane) - 1));
    if (kFill && block >= 0 && to < p.index.shape.columns)
      p.index.columns[to] = block * kBlock + column % kBlock;
    at += __popc(mask);
  }
  if (!kFill && lane == 0) p.index.column_offset[list + 1] = at;
}

/// Segments of query blocks and cover words, a warp a (head, query block).
__global__ void cover_kernel(const BuildParams p) {
  const IndexShape& shape = p.index.shape;
  const int blocks = static_cast<int>(shape.q_blocks()), list = warp_of_grid(),
            lane = threadIdx.x % 32;
  if (list > blocks * shape.index_heads) return;
  if (lane == 0) p.index.cover_offset[list] = static_cast<std::int64_t>(list) * p.cover_stride;
  if (list == blocks * shape.index_heads) return;
  const int h = list / blocks, b = list % blocks;
  const QueryBlockView view(p, h, b);
  int filled = b;  // padding counts to the segment before it
  while (filled > 0 && p.axes.query_slot[filled] < 0) --filled;
  const int segment =
      p.axes.query_slot[filled] < 0 ? 0 : p.axes.slot_segment[p.axes.query_slot[filled]];
  if (h == 0 && lane == 0) p.index.block_segment[b] = segment;
  const std::int64_t first = p.index.column_offset[h * p.axes.segments + segment],
                     last = p.index.column_offset[h * p.axes.segments + segment + 1];
  std::uint64_t* words = p.index.cover + static_cast<std::int64_t>(list) * p.cover_stride;
  for (int g = 0; first + 64ll * g < last; ++g) {
    std::uint32_t half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t column = first + 64ll * g + 32 * i + lane;
      half[i] =
          __ballot_sync(~0u, column < last && view.slot >= 0 &&
                                 view.computes(p.axes.key_slot[p.index.columns[column] / kBlock]));
    }
    if (lane == 0) words[g] = static_cast<std::uint64_t>(half[1]) << 32 | half[0];
  }
}

/// A warp a (head, query block), two rows a lane.
__global__ void count_pairs_kernel(const DeviceIndex x, unsigned long long* pairs) {
  const int blocks = static_cast<int>(x.shape.q_blocks()), list = warp_of_grid(),
            lane = threadIdx.x % 32;
  if (list >= blocks * x.shape.index_heads) return;
  const int b = list % blocks;
  unsigned long long sum = 0;
  for (int r = lane; r < kBlock; r += 32) {
    const Interval seen = x.rows[static_cast<std::int64_t>(b) * kBlock + r];
    for (std::int64_t i = x.run_offset[list]; i < x.run_offset[list + 1]; ++i) {
      if (x.runs[i].row_mask >= 0 && !(x.row_masks[x.runs[i].row_mask] >> r & 1)) continue;
      sum += max(
          0, min(seen.end, x.runs[i].last * kBlock) - max(seen.begin, x.runs[i].first * kBlock));
    }
    if (!x.has_columns()) continue;
    const Interval columns = x.column_bounds[static_cast<std::int64_t>(list) * kBlock + r];
    for (int g = columns.begin / kBlock; g * kBlock < columns.end; ++g) {
      const int low = max(columns.begin - g * kBlock, 0),
                high = min(columns.end - g * kBlock, kBlock);
      const std::uint64_t below = high == kBlock ? ~0ull : (1ull << high) - 1;
      sum += __popcll(below & ~((1ull << low) - 1) & ~x.cover[x.cover_offset[list] + g]);
    }
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) atomicAdd(pairs, sum);
}

int bitmap_words(const PatternAxes& axes) { return axes.slots / 32 + 2; }
int warps(std::int64_t n) { return static_cast<int>((n * 32 + kThreads - 1) / kThreads); }

}  // namespace

IndexShape slash_shape(std::int64_t q_tokens, std::int64_t k_tokens, int q_heads, int kv_heads,
                       const PatternCaps& caps, const std::vector<std::int32_t>& query_slot,
                       const std::vector<std::int32_t>& segment_slot,
                       const std::vector<std::uint8_t>& whole, std::int64_t block_pairs) {
  IndexShape s;
  s.q_tokens = q_tokens;
  s.k_tokens = k_tokens;
  s.q_heads = s.index_heads = q_heads;
  s.kv_heads = kv_heads;
  s.segments = static_cast<int>(whole.size());
  std::int64_t pairs = block_pairs, all_columns = 0, longest = 0;
  for (int h = 0; h < q_heads; ++h) {
    const std::int32_t* slashes = caps.slashes.data() + static_cast<std::size_t>(h) * whole.size();
    const std::int32_t* columns = caps.columns.data() + static_cast<std::size_t>(h) * whole.size();
    for (std::int32_t slot : query_slot) {
      if (slot < 0) continue;
      const auto segment = std::upper_bound(segment_slot.begin(), segment_slot.end(), slot) -
                           segment_slot.begin() - 1;
      const std::int64_t seen =
          std::min<std::int64_t>(slot - segment_slot[segment] + 1, s.k_blocks());
      // The main diagonal and the first block come on top.
      pairs += whole[segment] ? seen : std::min(seen, std::int64_t{slashes[segment]} + 2);
    }
    for (std::size_t i = 0; i < whole.size(); ++i) {
      const std::int64_t keys = std::int64_t{kBlock} * (segment_slot[i + 1] - segment_slot[i]);
      const std::int64_t most = whole[i] ? 0 : std::min({std::int64_t{columns[i]}, keys, k_tokens});
      all_columns += most;
      longest = std::max(longest, most);
    }
  }
  s.runs = s.block_pairs = std::max<std::int64_t>(1, pairs);
  s.columns = all_columns;
  if (s.columns > 0) s.cover_words = q_heads * s.q_blocks() * ((longest + kBlock - 1) / kBlock);
  return s;
}

std::size_t slash_scratch_bytes(int q_heads, const PatternAxes& axes) {
  return static_cast<std::size_t>(q_heads) * bitmap_words(axes) * 4;
}

cudaError_t build_slash_index(const DeviceIndex& index, const PatternAxes& axes,
                              const PatternLists& slashes, const PatternLists& columns,
                              const BlockLists& blocks, void* scratch, cudaStream_t stream) {
  const IndexShape& s = index.shape;
  if (s.dense || s.index_heads != s.q_heads || s.segments != axes.segments)
    return cudaErrorInvalidValue;
  const int lists = static_cast<int>(s.index_heads * s.q_blocks()),
            column_lists = s.index_heads * axes.segments;
  if (lists == 0 || column_lists == 0) return cudaSuccess;
  BuildParams p{index,
                axes,
                slashes,
                columns,
                blocks,
                static_cast<std::uint32_t*>(scratch),
                bitmap_words(axes),
                s.columns > 0 ? static_cast<int>(s.cover_words / lists) : 0};
  cudaError_t e = cudaMemsetAsync(scratch, 0, slash_scratch_bytes(s.q_heads, axes), stream);
  if (e != cudaSuccess) return e;
  mark_slashes_kernel<<<column_lists, 128, 0, stream>>>(p);
  runs_kernel<false><<<warps(lists), kThreads, 0, stream>>>(p);
  accumulate_offsets<<<1, 1024, 0, stream>>>(index.run_offset, lists, s.runs);
  runs_kernel<true><<<warps(lists), kThreads, 0, stream>>>(p);
  if (index.has_columns()) {
    columns_kernel<false><<<column_lists, 32, 0, stream>>>(p);
    accumulate_offsets<<<1, 1024, 0, stream>>>(index.column_offset, column_lists, s.columns);
    columns_kernel<true><<<column_lists, 32, 0, stream>>>(p);
    cover_kernel<<<warps(lists + 1), kThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t count_pairs(const DeviceIndex& index, std::uint64_t* pairs, cudaStream_t stream) {
  const std::int64_t lists = index.shape.index_heads * index.shape.q_blocks();
  if (index.shape.dense) return cudaErrorInvalidValue;
  if (lists == 0 || index.shape.k_tokens == 0) return cudaSuccess;
  count_pairs_kernel<<<warps(lists), kThreads, 0, stream>>>(
      index, reinterpret_cast<unsigned long long*>(pairs));
  return cudaGetLastError();
}

}  // namespace ballast::cuda
