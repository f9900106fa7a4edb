// From the pattern blocks that 64 queries chose to the runs and row masks of a DeviceIndex
// (block_launch.hpp): a warp a list, 32 key blocks at a time, as in slash_index.cu.
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/block_launch.hpp"
#include "kernels/cuda/index/lists.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::uint64_t kAll = ~0ull;

/// Runs of one (head, query block): counted when kFill is false, written when true.
template <bool kFill>
__global__ void runs_kernel(const BlockChoice x, const DeviceIndex index, std::int64_t* offset,
                            unsigned long long* pairs) {
  const int list = static_cast<int>(
                (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32),
            lane = threadIdx.x % 32;
  if (list >= x.queries.blocks * x.heads) return;
  const int b = list % x.queries.blocks, tokens = x.queries.rows[b];
  const int first = x.queries.first[b], own = x.queries.own[b] - first;
  const std::uint64_t rows = tokens >= kBlock ? kAll : (1ull << tokens) - 1;
  const std::int64_t last_row = min(static_cast<std::int64_t>(b + 1) * kBlock, x.q_tokens) - 1;
  const int low = x.key_begin[static_cast<std::int64_t>(b) * kBlock] / kBlock;
  const int high = tokens == 0 ? low : (x.key_end[last_row] + kBlock - 1) / kBlock;
  const std::uint64_t* words = x.words + static_cast<std::int64_t>(list) * x.width;
  const auto number = [&](int kb) { return x.keys.own[kb] - first; };
  const auto word = [&](int kb) -> std::uint64_t {  // a block that all tokens use needs no mask
    if (kb < low || kb >= high) return 0;
    const int j = number(kb);
    if (j < 0 || j > own) return 0;
    const std::uint64_t w = j == own ? rows : words[j];
    return w == rows ? kAll : w;
  };
  const auto joined = [&](int kb) {  // kb and kb + 1 lie in one run
    const std::uint64_t w = word(kb), next = word(kb + 1);
    return w != 0 && next != 0 &&
           ((w == kAll && next == kAll) || (w == next && number(kb) == number(kb + 1)));
  };
  const unsigned below = (1u << lane) - 1;
  std::int64_t starts = kFill ? index.run_offset[list] : 0, ends = starts;
  unsigned used = 0;
  for (int base = low; base < high; base += 32) {
    const int kb = base + lane;
    const std::uint64_t w = word(kb);
    const bool start = w != 0 && !joined(kb - 1), end = w != 0 && !joined(kb);
    const unsigned start_mask = __ballot_sync(~0u, start), end_mask = __ballot_sync(~0u, end);
    used += __popc(__ballot_sync(~0u, w != 0));
    if constexpr (kFill) {
      const std::int64_t s = starts + __popc(start_mask & below),
                         e = ends + __popc(end_mask & below);
      if (start && s < index.shape.runs) {
        index.runs[s].first = kb;
        index.runs[s].row_mask = w == kAll ? -1 : static_cast<std::int32_t>(s);
        if (s < index.shape.row_masks) index.row_masks[s] = w;
      }
      if (end && e < index.shape.runs) index.runs[e].last = kb + 1;
    }
    starts += __popc(start_mask);
    ends += __popc(end_mask);
  }
  if (!kFill && lane == 0) {
    offset[list + 1] = starts;
    if (used > 0) atomicAdd(pairs, static_cast<unsigned long long>(used));
  }
}

unsigned grid(const BlockChoice& x) {
  return static_cast<unsigned>(
      (static_cast<std::int64_t>(x.queries.blocks) * x.heads * 32 + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t count_block_runs(const BlockChoice& x, std::int64_t* offset, std::uint64_t* pairs,
                             cudaStream_t stream) {
  if (x.queries.blocks * x.heads > 0)
    runs_kernel<false><<<grid(x), kThreads, 0, stream>>>(
        x, {}, offset, reinterpret_cast<unsigned long long*>(pairs));
  accumulate_offsets<<<1, 1024, 0, stream>>>(offset, x.queries.blocks * x.heads, LLONG_MAX);
  return cudaGetLastError();
}

cudaError_t fill_block_runs(const DeviceIndex& index, const BlockChoice& x, cudaStream_t stream) {
  if (index.shape.dense || index.shape.index_heads != x.heads || index.has_columns())
    return cudaErrorInvalidValue;
  if (x.queries.blocks * x.heads == 0) return cudaSuccess;
  runs_kernel<true><<<grid(x), kThreads, 0, stream>>>(x, index, nullptr, nullptr);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
