// Derives on the GPU what the attention kernels need besides the AttentionPattern itself: padded
// row bounds, transposed lists and the gathered columns; work orders are in order.cu.
// Every kernel here is small; sizes follow what the index selects.
#include <cuda_bf16.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/index/lists.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256;

int grid(std::int64_t threads) {
  return static_cast<int>(std::max<std::int64_t>(1, (threads + kThreads - 1) / kThreads));
}

__device__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__global__ void row_bounds_kernel(DeviceIndex x) {
  const std::int64_t q = thread_index();
  const std::int64_t tokens = x.shape.q_tokens;
  if (q >= x.shape.q_blocks() * kBlock) return;
  const bool real = q < tokens;
  const int begin = real ? x.key_begin[q] : 0, end = real ? x.key_end[q] : 0;
  x.rows[q] = {begin, end};
  if (q % kBlock == 0) {
    const std::int64_t last = min(q + kBlock, tokens) - 1;
    x.bounds[q / kBlock] = {begin, x.key_begin[last], end, x.key_end[last]};
  }
}

__global__ void query_range_kernel(DeviceIndex x) {
  const std::int64_t kb = thread_index();
  if (kb >= x.shape.k_blocks()) return;
  const int blocks = static_cast<int>(x.shape.q_blocks());
  const int first = static_cast<int>(kb) * kBlock;
  const int begin = first_true(blocks, [&](int b) { return x.bounds[b].end_last > first; });
  const int end =
      first_true(blocks, [&](int b) { return x.bounds[b].begin_first >= first + kBlock; });
  x.query_range[kb] = {begin, max(begin, end)};
}

/// Bounds never decrease from row to row, so the rows that see a key are an interval.
__global__ void key_queries_kernel(DeviceIndex x) {
  const std::int64_t key = thread_index();
  if (key >= x.key_rows()) return;
  const int rows = key < x.shape.k_tokens ? static_cast<int>(x.shape.q_tokens) : 0;
  const int begin = first_true(rows, [&](int q) { return x.key_end[q] > key; });
  const int end = first_true(rows, [&](int q) { return x.key_begin[q] > key; });
  x.key_queries[key] = {begin, max(begin, end)};
}

// --- columns
// -------------------------------------------------------------------------------------------------
__global__ void column_offsets_kernel(DeviceIndex x) {
  if (threadIdx.x != 0) return;
  const int lists = x.shape.index_heads * x.shape.segments;
  int row = 0;
  for (int l = 0; l < lists; ++l) {
    x.column_row_offset[l] = row;
    const int n = static_cast<int>(x.column_offset[l + 1] - x.column_offset[l]);
    row += (n + kColumnTile - 1) / kColumnTile * kColumnTile;
  }
  x.column_row_offset[lists] = row;
}

__global__ void column_rows_kernel(DeviceIndex x) {
  const std::int64_t row = thread_index();
  if (row >= x.column_rows()) return;
  const int lists = x.shape.index_heads * x.shape.segments;
  if (row >= x.column_row_offset[lists]) {
    x.column_row_key[row] = -1;
    x.column_row_queries[row] = {0, 0};
    return;
  }
  // The last list that starts at or before this row and is not empty.
  const int list = first_true(lists, [&](int l) { return x.column_row_offset[l + 1] > row; });
  const int i = static_cast<int>(row) - x.column_row_offset[list];
  const std::int64_t first = x.column_offset[list];
  const int key = first + i < x.column_offset[list + 1] ? x.columns[first + i] : -1;
  x.column_row_key[row] = key;
  x.column_row_queries[row] = key < 0 ? Interval{0, 0} : x.key_queries[key];
  if (row % kColumnTile == 0) x.column_tile_list[row / kColumnTile] = list;
}

__global__ void column_bounds_kernel(DeviceIndex x) {
  const std::int64_t i = thread_index();
  const std::int64_t rows = x.shape.q_blocks() * kBlock;
  if (i >= rows * x.shape.index_heads) return;
  const int h = static_cast<int>(i / rows);
  const std::int64_t q = i % rows;
  const int list = h * x.shape.segments + x.block_segment[q / kBlock];
  const std::int32_t* columns = x.columns + x.column_offset[list];
  const int n = static_cast<int>(x.column_offset[list + 1] - x.column_offset[list]);
  const Interval seen = x.rows[q];
  if (q >= x.shape.q_tokens) {
    x.column_bounds[i] = {0, 0};
  } else {
    x.column_bounds[i] = {first_true(n, [&](int b) { return columns[b] >= seen.begin; }),
                          first_true(n, [&](int b) { return columns[b] >= seen.end; })};
  }
}

__global__ void column_tile_queries_kernel(DeviceIndex x) {
  const std::int64_t tile = thread_index();
  const int lists = x.shape.index_heads * x.shape.segments;
  if (tile >= x.column_row_offset[lists] / kColumnTile) return;
  const int list = x.column_tile_list[tile];
  const int h = list / x.shape.segments, segment = list % x.shape.segments;
  const int first_column = static_cast<int>(tile) * kColumnTile - x.column_row_offset[list];
  const int blocks = static_cast<int>(x.shape.q_blocks());
  const int stop = first_true(blocks, [&](int b) { return x.block_segment[b] > segment; });
  const Interval* bounds = x.column_bounds + static_cast<std::int64_t>(h) * blocks * kBlock;
  const int begin = first_true(stop, [&](int b) {
    const std::int64_t last = min(static_cast<std::int64_t>(b + 1) * kBlock, x.shape.q_tokens) - 1;
    return x.block_segment[b] >= segment && bounds[last].end > first_column;
  });
  x.column_tile_queries[tile] = {begin, max(begin, stop)};
}

// --- transpose
// -------------------------------------------------------------------------------------------------
/// Calls f(key block, row mask) for every visible block of a query block's list.
template <class F>
__device__ void for_each_block(const DeviceIndex& x, std::int64_t list, F f) {
  const BlockBounds b = x.bounds[list % x.shape.q_blocks()];
  const int low = b.begin_first / kBlock, high = (b.end_last + kBlock - 1) / kBlock;
  for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
    const BlockRun run = x.runs[r];
    for (int kb = max(run.first, low); kb < min(run.last, high); ++kb) f(kb, run.row_mask);
  }
}

__global__ void transpose_count_kernel(DeviceIndex x) {
  const std::int64_t list = thread_index();
  if (list >= x.shape.q_blocks() * x.shape.index_heads) return;
  const std::int64_t first = list / x.shape.q_blocks() * x.shape.k_blocks();
  for_each_block(x, list, [&](int kb, int) { atomicAdd(&x.scratch_count[first + kb], 1); });
}

/// offset = exclusive sum of count; count restarts at 0.  One CTA of 1,024 threads.
__global__ void scan_kernel(std::int32_t* count, std::int32_t* offset, int n) {
  __shared__ int sums[1024];
  const int each = (n + 1023) / 1024;
  const int first = min(n, static_cast<int>(threadIdx.x) * each), last = min(n, first + each);
  int sum = 0;
  for (int i = first; i < last; ++i) sum += count[i];
  int running = sum_of_earlier(sum, sums);
  for (int i = first; i < last; ++i) {
    offset[i] = running;
    running += count[i];
    count[i] = 0;
  }
  if (threadIdx.x == 1023) offset[n] = sums[1023];
}

__global__ void transpose_fill_kernel(DeviceIndex x) {
  const std::int64_t list = thread_index();
  if (list >= x.shape.q_blocks() * x.shape.index_heads) return;
  const std::int64_t first = list / x.shape.q_blocks() * x.shape.k_blocks();
  const std::uint64_t qb = static_cast<std::uint64_t>(list % x.shape.q_blocks());
  for_each_block(x, list, [&](int kb, int mask) {
    const int at = x.transposed_offset[first + kb] + atomicAdd(&x.scratch_count[first + kb], 1);
    if (at < x.shape.block_pairs) x.scratch[at] = qb << 32 | static_cast<std::uint32_t>(mask + 1);
  });
}

/// Sorts each list by rank counting (keys are distinct), which also undoes the arbitrary order of
/// the fill.
__global__ void transpose_sort_kernel(DeviceIndex x) {
  __shared__ std::uint64_t part[1024];
  const int begin = x.transposed_offset[blockIdx.x], end = x.transposed_offset[blockIdx.x + 1];
  for (int base = begin; base < end; base += blockDim.x) {
    const int i = base + static_cast<int>(threadIdx.x);
    const std::uint64_t mine = i < end ? x.scratch[i] : 0;
    int rank = 0;
    for (int chunk = begin; chunk < end; chunk += 1024) {
      const int n = min(1024, end - chunk);
      __syncthreads();
      for (int j = threadIdx.x; j < n; j += blockDim.x) part[j] = x.scratch[chunk + j];
      __syncthreads();
      if (i < end) {
        for (int j = 0; j < n; ++j) rank += part[j] < mine;
      }
    }
    if (i < end) {
      const int qb = static_cast<int>(mine >> 32);
      x.transposed[begin + rank] = {qb, qb + 1, static_cast<int>(mine & 0xFFFFFFFFu) - 1};
    }
  }
}

// --- gathered columns
// -----------------------------------------------------------------------------------------------
__global__ void gather_kernel(DeviceIndex x, const __nv_bfloat16* k, std::int64_t k_stride,
                              const __nv_bfloat16* v, std::int64_t v_stride, int head_dim,
                              __nv_bfloat16* column_k, __nv_bfloat16* column_v) {
  const std::int64_t item = thread_index() / 32;  // a warp copies one row of one head
  const int heads = x.column_heads();
  if (item >= x.column_rows() * heads) return;
  const std::int64_t row = item / heads;
  const int key = x.column_row_key[row];
  int kv_head = static_cast<int>(item % heads);
  if (x.shape.index_heads != 1 && key >= 0) {
    kv_head = x.column_tile_list[row / kColumnTile] / x.shape.segments /
              (x.shape.q_heads / x.shape.kv_heads);
  }
  for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
    column_k[item * head_dim + d] =
        key < 0 ? __nv_bfloat16(0.0f) : k[key * k_stride + kv_head * head_dim + d];
    column_v[item * head_dim + d] =
        key < 0 ? __nv_bfloat16(0.0f) : v[key * v_stride + kv_head * head_dim + d];
  }
}

/// Adds the gathered gradients of the query heads congruent to `member` modulo the group: columns
/// of one head are distinct, so no two warps of a launch meet, and launches in order make the sum
/// the same every time.
__global__ void scatter_kernel(DeviceIndex x, const float* column_dk, const float* column_dv,
                               int head_dim, float* dk, std::int64_t dk_stride, float* dv,
                               std::int64_t dv_stride, int member) {
  const std::int64_t item = thread_index() / 32;
  const int heads = x.column_heads(), group = x.shape.q_heads / x.shape.kv_heads;
  if (item >= x.column_rows() * heads) return;
  const std::int64_t row = item / heads;
  const int key = x.column_row_key[row];
  if (key < 0) return;
  int kv_head = static_cast<int>(item % heads);
  if (x.shape.index_heads != 1) {
    const int h = x.column_tile_list[row / kColumnTile] / x.shape.segments;
    if (h % group != member) return;
    kv_head = h / group;
  }
  for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
    dk[key * dk_stride + kv_head * head_dim + d] += column_dk[item * head_dim + d];
    dv[key * dv_stride + kv_head * head_dim + d] += column_dv[item * head_dim + d];
  }
}

/// Whether every query block has one run that holds all its visible keys.
bool is_dense(const PatternArrays& x) {
  if (x.dense || x.has_columns()) return x.dense;
  for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
    // Rows at either end may see nothing: bounds never decrease, so the others' are from the first
    // to the last that sees something.
    int low = 0, high = 0;
    x.visible.for_rows(b * kBlock, std::min((b + 1) * kBlock, x.q_tokens()),
                       [&](std::int64_t, KeyInterval keys) {
                         if (keys.begin >= keys.end) return;
                         if (high == 0) low = keys.begin / kBlock;
                         high = (keys.end + kBlock - 1) / kBlock;
                       });
    for (int h = 0; high > 0 && h < x.index_heads; ++h) {
      const std::int64_t list = h * x.q_blocks() + b, r = x.run_offset[list];
      if (x.run_offset[list + 1] - r != 1 || x.runs[r].row_mask >= 0 || x.runs[r].first > low ||
          x.runs[r].last < high)
        return false;
    }
  }
  return true;
}

}  // namespace

IndexShape shape_of(const PatternArrays& index, int q_heads, int kv_heads, int head_dim) {
  IndexShape s;
  s.q_tokens = index.q_tokens();
  s.k_tokens = index.k_tokens;
  s.q_heads = q_heads;
  s.kv_heads = kv_heads;
  s.head_dim = head_dim;
  s.dense = is_dense(index);
  if (s.dense) s.pairs = index.visible.pairs();
  if (s.dense) return s;  // one pattern for all heads, whatever index.index_heads says
  s.index_heads = index.index_heads;
  s.runs = static_cast<std::int64_t>(index.runs.size());
  s.row_masks = static_cast<std::int64_t>(index.row_masks.size());
  for (const BlockRun& r : index.runs) s.block_pairs += r.last - r.first;
  s.columns = static_cast<std::int64_t>(index.columns.size());
  if (s.columns > 0) {
    s.segments = index.segments;
    s.cover_words = static_cast<std::int64_t>(index.cover.size());
  }
  return s;
}

cudaError_t upload_index(const PatternArrays& index, DeviceIndex& x, cudaStream_t stream) {
  return upload_index(index, x, [stream](void* to, const void* from, std::size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
  });
}

cudaError_t upload_index(const PatternArrays& index, DeviceIndex& x, const IndexCopy& send) {
  cudaError_t e = cudaSuccess;
  const auto copy = [&](auto* to, const auto& from, std::int64_t capacity) {
    if (static_cast<std::int64_t>(from.size()) > capacity) e = cudaErrorInvalidValue;
    if (e != cudaSuccess || from.empty()) return;
    e = send(to, from.data(), from.size() * sizeof(from[0]));
  };
  const IndexShape& s = x.shape;
  if (index.q_tokens() != s.q_tokens || index.k_tokens != s.k_tokens) return cudaErrorInvalidValue;
  std::vector<std::int32_t> begin, end;  // one a row, as the kernels read them
  index.visible.for_rows(0, s.q_tokens, [&](std::int64_t, KeyInterval keys) {
    begin.push_back(keys.begin);
    end.push_back(keys.end);
  });
  copy(x.key_begin, begin, s.q_tokens);
  copy(x.key_end, end, s.q_tokens);
  if (s.dense) return e;
  const std::int64_t q_lists = s.index_heads * s.q_blocks();
  copy(x.run_offset, index.run_offset, q_lists + 1);
  copy(x.runs, index.runs, s.runs);
  copy(x.row_masks, index.row_masks, s.row_masks);
  if (s.columns == 0) return e;
  copy(x.block_segment, index.block_segment, s.q_blocks());
  copy(x.column_offset, index.column_offset,
       static_cast<std::int64_t>(s.index_heads) * s.segments + 1);
  copy(x.columns, index.columns, s.columns);
  copy(x.cover_offset, index.cover_offset, q_lists + 1);
  copy(x.cover, index.cover, s.cover_words);
  return e;
}

cudaError_t derive_index(const DeviceIndex& x, cudaStream_t stream) {
  const IndexShape& s = x.shape;
  if (s.q_tokens == 0 || s.k_tokens == 0) return cudaSuccess;
  row_bounds_kernel<<<grid(s.q_blocks() * kBlock), kThreads, 0, stream>>>(x);
  query_range_kernel<<<grid(s.k_blocks()), kThreads, 0, stream>>>(x);
  key_queries_kernel<<<grid(x.key_rows()), kThreads, 0, stream>>>(x);
  if (x.has_columns()) {
    const std::int64_t tiles = x.column_rows() / kColumnTile;
    column_offsets_kernel<<<1, 32, 0, stream>>>(x);
    column_rows_kernel<<<grid(x.column_rows()), kThreads, 0, stream>>>(x);
    column_bounds_kernel<<<grid(s.index_heads * s.q_blocks() * kBlock), kThreads, 0, stream>>>(x);
    column_tile_queries_kernel<<<grid(tiles), kThreads, 0, stream>>>(x);
  }
  if (!s.dense) {
    const int lists = static_cast<int>(s.index_heads * s.k_blocks());
    cudaError_t e = cudaMemsetAsync(x.scratch_count, 0, lists * sizeof(std::int32_t), stream);
    if (e != cudaSuccess) return e;
    transpose_count_kernel<<<grid(s.index_heads * s.q_blocks()), kThreads, 0, stream>>>(x);
    scan_kernel<<<1, 1024, 0, stream>>>(x.scratch_count, x.transposed_offset, lists);
    transpose_fill_kernel<<<grid(s.index_heads * s.q_blocks()), kThreads, 0, stream>>>(x);
    transpose_sort_kernel<<<lists, 128, 0, stream>>>(x);
  }
  return order_work(x, stream);
}

cudaError_t gather_columns(const DeviceIndex& x, const void* k, std::int64_t k_stride,
                           const void* v, std::int64_t v_stride, int head_dim, void* column_k,
                           void* column_v, cudaStream_t stream) {
  gather_kernel<<<grid(x.column_rows() * x.column_heads() * 32), kThreads, 0, stream>>>(
      x, static_cast<const __nv_bfloat16*>(k), k_stride, static_cast<const __nv_bfloat16*>(v),
      v_stride, head_dim, static_cast<__nv_bfloat16*>(column_k),
      static_cast<__nv_bfloat16*>(column_v));
  return cudaGetLastError();
}

cudaError_t scatter_column_gradients(const DeviceIndex& x, const float* column_dk,
                                     const float* column_dv, int head_dim, float* dk,
                                     std::int64_t dk_stride, float* dv, std::int64_t dv_stride,
                                     cudaStream_t stream) {
  const int launches = x.shape.index_heads == 1 ? 1 : x.shape.q_heads / x.shape.kv_heads;
  for (int member = 0; member < launches; ++member) {
    scatter_kernel<<<grid(x.column_rows() * x.column_heads() * 32), kThreads, 0, stream>>>(
        x, column_dk, column_dv, head_dim, dk, dk_stride, dv, dv_stride, member);
  }
  return cudaGetLastError();
}

}  // namespace ballast::cuda
