// Lists of the query rows that chose each pattern block (routed_index.hpp): a counting sort whose
// order is that of routed_lists(), whatever the order of threads.
#include <algorithm>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/lists.cuh"
#include "kernels/cuda/index/routed_index.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 128;

/// 32 lists a CTA, a warp a part of the chunk's query blocks: rows counted, or where each word's
/// rows go, once the offsets are known.
constexpr int kParts = 16, kPartBlocks = kRoutedChunk / kParts;
template <bool kPlace>
__global__ __launch_bounds__(32 * kParts) void walk_kernel(const RoutedIndex x,
                                                           const std::uint64_t* words,
                                                           std::uint32_t* base) {
  __shared__ std::uint32_t counts[kParts][32];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32,
            block = static_cast<int>(blockIdx.x) * 32 + lane, kv_head = blockIdx.y,
            chunk = blockIdx.z, group = x.q_heads / x.kv_heads;
  const int list = (chunk * x.kv_heads + kv_head) * x.blocks + block;
  const std::int64_t head_words = static_cast<std::int64_t>(x.queries.blocks) * x.width;
  const int from = chunk * kRoutedChunk + part * kPartBlocks;
  const auto walk = [&](auto&& visit) {  // the words of the list in this part, in order
    for (int b = from; b < min(from + kPartBlocks, x.queries.blocks); ++b) {
      const int j = block - x.queries.first[b];
      if (j < 0 || block >= x.queries.own[b] || x.listed(b) == 0) continue;
      const std::int64_t first =
          kv_head * group * head_words + static_cast<std::int64_t>(b) * x.width + j;
#pragma unroll 8
      for (int g = 0; g < group; ++g) visit(first + g * head_words);
    }
  };
  std::uint32_t count = 0;
  walk([&](std::int64_t word) { count += __popcll(words[word]); });
  counts[part][lane] = count;
  __syncthreads();
  if (block >= x.blocks) return;
  std::uint32_t at = 0;
  for (int i = 0; i < (kPlace ? part : kParts); ++i) at += counts[i][lane];
  if constexpr (kPlace) {
    at += static_cast<std::uint32_t>(x.offset[list]);
    walk([&](std::int64_t word) {
      base[word] = at;
      at += __popcll(words[word]);
    });
  } else if (part == 0) {
    x.offset[list + 1] = at;
    x.unit_offset[list + 1] = (at + kRoutedUnit - 1) / kRoutedUnit;
  }
}

/// A thread a list: its units, of equal length but for rounding to whole tiles.  None is empty, as
/// a unit's limit is whole tiles too.
__global__ void units_kernel(const RoutedIndex x) {
  const int list = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (list >= x.lists()) return;
  const int begin = static_cast<int>(x.offset[list]),
            rows = static_cast<int>(x.offset[list + 1]) - begin;
  const std::int64_t first = x.unit_offset[list];
  const int pieces = static_cast<int>(x.unit_offset[list + 1] - first);
  for (int p = 0; p < pieces; ++p) {
    constexpr int kTile = 128;
    const int each = ((rows + pieces - 1) / pieces + kTile - 1) / kTile * kTile;
    x.units[first + p] = {list / x.blocks % x.kv_heads, x.block_key[list % x.blocks],
                          begin + p * each, min(each, rows - p * each)};
  }
}

/// A warp 32 rows of a head and query block: entries, and where they are.
__global__ void entries_kernel(const RoutedIndex x, const std::uint64_t* words,
                               const std::uint32_t* base) {
  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, row = static_cast<int>(warp % 2) * 32 + lane;
  const std::int64_t list = warp / 2;  // (head, query block)
  if (list >= static_cast<std::int64_t>(x.q_heads) * x.queries.blocks) return;
  const int b = static_cast<int>(list % x.queries.blocks),
            head = static_cast<int>(list / x.queries.blocks),
            before = x.queries.own[b] - x.queries.first[b];
  if (x.listed(b) == 0) return;
  const std::int64_t token = static_cast<std::int64_t>(b) * kBlock + row;
  const std::uint32_t entry = routed_entry(token, head % (x.q_heads / x.kv_heads));
  const std::uint64_t below = (1ull << row) - 1;
  std::int32_t* place =
      x.places + (static_cast<std::int64_t>(head) * x.queries.blocks * kBlock + token) * x.slots;
  for (int from = 0; from < before; from += 32) {
    const bool there = from + lane < before;
    const std::uint64_t mine = there ? words[list * x.width + from + lane] : 0;
    const std::uint32_t mine_base = there ? base[list * x.width + from + lane] : 0;
    unsigned used = __ballot_sync(~0u, mine != 0);
    while (used != 0) {
      const int j = __ffs(used) - 1;
      used &= used - 1;
      const std::uint64_t word = __shfl_sync(~0u, mine, j);
      const std::uint32_t at = __shfl_sync(~0u, mine_base, j) + __popcll(word & below);
      if (word >> row & 1) {
        x.entries[at] = entry;
        *place++ = static_cast<std::int32_t>(at);
      }
    }
  }
}

/// Capacity: every list that is not empty has one unit that is not full, at most.
std::int64_t unit_capacity(const RoutedWork& w) {
  return w.entries() / kRoutedUnit + w.index.lists() + 1;
}

template <class Take>
void lay_out(RoutedWork& w, Take&& take) {
  RoutedIndex& x = w.index;
  take(x.offset, x.lists() + 1);
  take(x.unit_offset, x.lists() + 1);
  take(x.units, unit_capacity(w));
  take(x.entries, w.entries());
  take(x.places, static_cast<std::int64_t>(x.q_heads) * x.queries.blocks * kBlock * x.slots);
}

unsigned grid(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

bool routed_fits(std::int64_t head_dim, std::int64_t block_tokens) {
  int device = 0, major = 0;
  return routed_kernels(head_dim, block_tokens) && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major == 9;
}

std::vector<std::int64_t> routed_chunks(const RoutedAxis& axis,
                                        const std::vector<std::int32_t>& rows) {
  std::vector<std::int64_t> begin(static_cast<std::size_t>(axis.chunks()) + 1, 0);
  for (int b = 0; b < axis.query_blocks(); ++b)
    begin[static_cast<std::size_t>(b / kRoutedChunk) + 1] +=
        static_cast<std::int64_t>(axis.q_heads) * rows[b] * axis.listed(b);
  for (std::size_t c = 1; c < begin.size(); ++c) begin[c] += begin[c - 1];
  return begin;
}

std::size_t routed_bytes(const RoutedWork& work) {
  RoutedWork copy = work;
  std::size_t bytes = 0;
  lay_out(copy, [&](auto*& pointer, std::int64_t n) {
    bytes += (static_cast<std::size_t>(n) * sizeof(*pointer) + 255) / 256 * 256;
  });
  return bytes;
}

void bind_routed(RoutedWork& work, void* buffer) {
  char* at = static_cast<char*>(buffer);
  lay_out(work, [&](auto*& pointer, std::int64_t n) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += (static_cast<std::size_t>(n) * sizeof(*pointer) + 255) / 256 * 256;
  });
}

cudaError_t build_routed(const RoutedWork& work, const std::uint64_t* words, std::uint32_t* base,
                         cudaStream_t stream) {
  const RoutedIndex& x = work.index;
  if (work.entries() >= 1ll << 31 || x.q_tokens >= 1ll << 28) return cudaErrorInvalidValue;
  if (x.lists() == 0) return cudaSuccess;
  const dim3 lists(static_cast<unsigned>((x.blocks + 31) / 32), static_cast<unsigned>(x.kv_heads),
                   static_cast<unsigned>(x.chunks()));
  walk_kernel<false><<<lists, 32 * kParts, 0, stream>>>(x, words, base);
  accumulate_offsets<<<1, 1024, 0, stream>>>(x.offset, x.lists(), LLONG_MAX);
  accumulate_offsets<<<1, 1024, 0, stream>>>(x.unit_offset, x.lists(), LLONG_MAX);
  walk_kernel<true><<<lists, 32 * kParts, 0, stream>>>(x, words, base);
  units_kernel<<<grid(x.lists()), kThreads, 0, stream>>>(x);
  entries_kernel<<<grid(static_cast<std::int64_t>(x.q_heads) * x.queries.blocks * 64), kThreads, 0,
                   stream>>>(x, words, base);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
