// Recall on the GPU: one block of 64 keys lies in shared memory, and every warp takes queries
// against it; a block of keys is one part of the computed pairs, so its sums are two numbers.
#include <cuda_bf16.h>

#include "kernels/cuda/index/recall_launch.hpp"
#include "kernels/cuda/index/slash_launch.hpp"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxDim = 256;
constexpr int kSums = 5;  // all, then sink, own, blocks, columns (RecallPart)

__global__ void queries_kernel(RecallRows x, const __nv_bfloat16* q, std::int64_t stride, int width,
                               float* queries) {
  await_earlier_work();
  const int row = blockIdx.x, local = x.local[row];
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    queries[static_cast<std::int64_t>(row) * width + c] =
        local < 0 ? 0.0f : __bfloat162float(q[local * stride + c]);
}

/// Sets all bits of the key axis' blocks that blocks [first, last) of the call are, where they lie
/// in the row's segment.
struct WordWriter {
  std::uint64_t* words;  ///< by block of the key axis
  const std::int32_t* key_block;
  int base, end;
  __device__ void whole(int first, int last, int step_from, int step) const {
    for (int b = first + step_from; b < last; b += step) {
      const int block = key_block[b];
      if (block >= base && block < end) words[block] = ~std::uint64_t{0};
    }
  }
};

/// Number of the list that an entry of routed_lists() stands in.
__device__ std::int64_t list_of(const RoutedIndex& x, std::int64_t entry) {
  std::int64_t low = 0, high = x.lists();  // offset[low] <= entry < offset[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (x.offset[middle] <= entry ? low : high) = middle;
  }
  return low;
}

__global__ void computed_kernel(RecallRows x, DeviceIndex index, RoutedIndex routed,
                                const std::int32_t* key_block, std::int64_t words_a_head,
                                std::uint64_t* words) {
  await_earlier_work();
  const int row = blockIdx.x, head = blockIdx.y, local = x.local[row];
  const int tid = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (local < 0) return;
  const int base = x.base[row], end = base + x.first_word[row + 1] - x.first_word[row];
  const WordWriter to{words + head * words_a_head + x.first_word[row] - base, key_block, base, end};
  const int query_block = local / kBlock, bit = local % kBlock,
            k_blocks = static_cast<int>(index.shape.k_blocks());
  if (index.shape.dense) {
    const Interval keys = index.rows[local];
    if (keys.begin < keys.end)
      to.whole(keys.begin / kBlock, (keys.end + kBlock - 1) / kBlock, tid, threads);
  } else {
    const std::int64_t list =
        (index.shape.index_heads > 1 ? head : 0) * index.shape.q_blocks() + query_block;
    for (std::int64_t r = index.run_offset[list] + tid; r < index.run_offset[list + 1];
         r += threads) {
      const BlockRun run = index.runs[r];
      if (run.row_mask < 0 || (index.row_masks[run.row_mask] >> bit & 1))
        to.whole(run.first, run.last, 0, 1);
    }
  }
  __syncthreads();
  if (index.has_columns()) {
    const int list = (index.shape.index_heads > 1 ? head : 0) * index.shape.segments +
                     index.block_segment[query_block];
    for (std::int64_t i = index.column_offset[list] + tid; i < index.column_offset[list + 1];
         i += threads) {
      const int key = index.columns[i], block = key_block[key / kBlock];
      if (block >= base && block < end)
        atomicOr(reinterpret_cast<unsigned long long*>(to.words + block), 1ull << (key % kBlock));
    }
  }
  if (routed.places == nullptr || routed.listed(query_block) == 0) return;
  const std::int32_t* places =
      routed.places +
      (static_cast<std::int64_t>(head) * kBlock * routed.queries.blocks + local) * routed.slots;
  for (int slot = tid; slot < routed.slots; slot += threads) {
    if (places[slot] < 0) continue;
    const int key = routed.block_key[list_of(routed, places[slot]) % routed.blocks] / kBlock;
    to.whole(key, min(key + routed.block_tokens / kBlock, k_blocks), 0, 1);
  }
}

/// A block of keys of one key head, in shared memory: pairs of values, a word more a row so that
/// lanes of neighbouring keys meet no bank twice.
struct KeyTile {
  __nv_bfloat162* pairs;
  int stride;
  __device__ static int words(int dim) { return dim / 2 + 1; }
  __device__ void load(const RecallScan& scan, std::int64_t first, int head) const {
    const auto* k = static_cast<const __nv_bfloat16*>(scan.k);
    const int half = scan.head_dim / 2;
    for (int i = threadIdx.x; i < kBlock * half; i += kThreads) {
      const int key = i / half, c = i % half;
      const std::int64_t token = first + key;
      pairs[key * stride + c] =
          token < scan.k_tokens
              ? reinterpret_cast<const __nv_bfloat162*>(
                    k + token * scan.k_stride + static_cast<std::int64_t>(head) * scan.head_dim)[c]
              : __nv_bfloat162{};
    }
    __syncthreads();
  }
  /// Scores of keys `lane` and `lane + 32`.
  __device__ float2 scores(const float* query, int dim, float scale) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const __nv_bfloat162 *a = pairs + lane * stride, *b = a + 32 * stride;
    float2 sum = make_float2(0, 0);
    for (int c = 0; c < dim / 2; ++c) {
      const float2 q = reinterpret_cast<const float2*>(query)[c], x = __bfloat1622float2(a[c]),
                   y = __bfloat1622float2(b[c]);
      sum.x = fmaf(q.y, x.y, fmaf(q.x, x.x, sum.x));
      sum.y = fmaf(q.y, y.y, fmaf(q.x, y.x, sum.y));
    }
    return make_float2(sum.x * scale, sum.y * scale);
  }
};

/// Calls f(row, head, scores, whether each is visible) for the queries of a warp against the block
/// of keys of this thread block, where it has any that they see.
template <class F>
__device__ void for_queries(const RecallRows& x, const RecallScan& scan, const KeyTile& tile,
                            const F& f) {
  const int first = static_cast<int>(blockIdx.x) * kBlock,
            lane = static_cast<int>(threadIdx.x % 32), group = scan.q_heads / scan.kv_heads;
  for (int i = static_cast<int>(threadIdx.x / 32); i < x.rows * group; i += kWarps) {
    const int row = i / group, head = static_cast<int>(blockIdx.y) * group + i % group;
    const Interval keys = x.visible[row];
    if (keys.end <= first || keys.begin >= first + kBlock || keys.end <= keys.begin) continue;
    const float* query =
        scan.queries + (static_cast<std::int64_t>(row) * scan.q_heads + head) * scan.head_dim;
    const auto seen = [&](int key) { return key >= keys.begin && key < keys.end; };
    f(row, head, tile.scores(query, scan.head_dim, scan.scale), seen(first + lane),
      seen(first + lane + 32));
  }
}

/// Raises a float that other threads raise too.
__device__ void raise(float* to, float value) {
  value += 0.0f;  // -0 as 0: their order as integers is another
  if (value >= 0)
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
  else
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
}

extern __shared__ __nv_bfloat162 shared_pairs[];

__global__ void __launch_bounds__(kThreads)
    maximum_kernel(RecallRows x, RecallScan scan, float* maximum) {
  await_earlier_work();
  const KeyTile tile{shared_pairs, KeyTile::words(scan.head_dim)};
  tile.load(scan, std::int64_t{blockIdx.x} * kBlock, static_cast<int>(blockIdx.y));
  for_queries(x, scan, tile, [&](int row, int head, float2 score, bool low, bool high) {
    const float most = warp_max(fmaxf(low ? score.x : -INFINITY, high ? score.y : -INFINITY));
    if (threadIdx.x % 32 == 0)
      raise(maximum + static_cast<std::int64_t>(head) * x.rows + row, most);
  });
}

__global__ void __launch_bounds__(kThreads)
    sums_kernel(RecallRows x, RecallScan scan, const float* maximum, const std::int32_t* key_block,
                const std::uint64_t* words, int index_heads, std::int64_t words_a_head,
                std::int64_t* sums) {
  await_earlier_work();
  const KeyTile tile{shared_pairs, KeyTile::words(scan.head_dim)};
  tile.load(scan, std::int64_t{blockIdx.x} * kBlock, static_cast<int>(blockIdx.y));
  const int lane = static_cast<int>(threadIdx.x % 32);
  for_queries(x, scan, tile, [&](int row, int head, float2 score, bool low, bool high) {
    const std::int64_t at = static_cast<std::int64_t>(head) * x.rows + row;
    const float top = maximum[at];
    const auto mass = [&](float s, bool seen) {
      return seen ? __float2ll_rz(expf(s - top) * static_cast<float>(1ll << kMassBits)) : 0ll;
    };
    const int block = key_block[blockIdx.x] - x.base[row];
    const std::uint64_t bits =
        words[(index_heads > 1 ? head : 0) * words_a_head + x.first_word[row] + block];
    const long long a = mass(score.x, low), b = mass(score.y, high);
    const long long all = warp_sum(a + b), computed = warp_sum((bits >> lane & 1 ? a : 0) +
                                                               (bits >> (lane + 32) & 1 ? b : 0));
    if (lane != 0) return;
    const int part = block == 0 ? 0 : block == x.own[row] ? 1 : bits == ~std::uint64_t{0} ? 2 : 3;
    auto* to = reinterpret_cast<unsigned long long*>(sums + at * kSums);
    atomicAdd(to, static_cast<unsigned long long>(all));
    if (computed != 0) atomicAdd(to + 1 + part, static_cast<unsigned long long>(computed));
  });
}

dim3 scan_grid(const RecallScan& scan) {
  return dim3(static_cast<unsigned>((scan.k_tokens + kBlock - 1) / kBlock),
              static_cast<unsigned>(scan.kv_heads));
}
std::size_t scan_bytes(const RecallScan& scan) {
  return sizeof(__nv_bfloat162) * kBlock * (static_cast<std::size_t>(scan.head_dim) / 2 + 1);
}
bool fits(const RecallScan& scan) {
  return scan.head_dim > 0 && scan.head_dim % 2 == 0 && scan.head_dim <= kMaxDim &&
         scan.k_stride % 2 == 0;
}

}  // namespace

cudaError_t recall_queries(const RecallRows& x, const void* q, std::int64_t stride, int width,
                           float* queries, cudaStream_t stream) {
  if (x.rows > 0)
    launch(queries_kernel, static_cast<unsigned>(x.rows), kThreads, 0, stream, x,
           static_cast<const __nv_bfloat16*>(q), stride, width, queries);
  return cudaGetLastError();
}

cudaError_t recall_computed(const RecallRows& x, const DeviceIndex& index,
                            const RoutedIndex* routed, const std::int32_t* key_block, int heads,
                            std::int64_t words_a_head, std::uint64_t* words, cudaStream_t stream) {
  if (x.rows > 0 && index.shape.k_tokens > 0)
    launch(computed_kernel, dim3(static_cast<unsigned>(x.rows), static_cast<unsigned>(heads)), 128,
           0, stream, x, index, routed != nullptr ? *routed : RoutedIndex{}, key_block,
           words_a_head, words);
  return cudaGetLastError();
}

cudaError_t recall_maximum(const RecallRows& x, const RecallScan& scan, float* maximum,
                           cudaStream_t stream) {
  if (!fits(scan)) return cudaErrorInvalidValue;
  if (x.rows > 0 && scan.k_tokens > 0)
    launch(maximum_kernel, scan_grid(scan), kThreads, scan_bytes(scan), stream, x, scan, maximum);
  return cudaGetLastError();
}

cudaError_t recall_sums(const RecallRows& x, const RecallScan& scan, const float* maximum,
                        const std::int32_t* key_block, const std::uint64_t* words, int index_heads,
                        std::int64_t words_a_head, std::int64_t* sums, cudaStream_t stream) {
  if (!fits(scan)) return cudaErrorInvalidValue;
  if (x.rows > 0 && scan.k_tokens > 0)
    launch(sums_kernel, scan_grid(scan), kThreads, scan_bytes(scan), stream, x, scan, maximum,
           key_block, words, index_heads, words_a_head, sums);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
