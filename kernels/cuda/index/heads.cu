// Patterns that differ by head (heads_launch.hpp).  Sums are taken in an order that depends on the
// data's place in its segment alone, so that every rank of a ring finds the same.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "core/plan/attention/segment_limits.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/index/heads_launch.hpp"
#include "kernels/cuda/runtime/head_dims.hpp"

namespace ballast::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kQueryBlocks = 8;  // blocks of queries of a CTA

/// Elements d of the dot product of a mean query (in shared memory) with a mean key that one lane
/// takes, added over the warp.
template <int D>
__device__ float dot_mean(const float* query, const bf16* high, const bf16* low, int lane) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int d = i * 32 + lane;
    sum += query[d] * (__bfloat162float(high[d]) + __bfloat162float(low[d]));
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

/// One CTA: kQueryBlocks blocks of queries of one head against all blocks of keys up to theirs.
template <int D>
__global__ __launch_bounds__(kThreads) void pooled_kernel(const Routing x, float scale,
                                                          float* scores) {
  __shared__ float mean[kQueryBlocks][D], part[kThreads];
  __shared__ int first[kQueryBlocks], own[kQueryBlocks];
  const int head = blockIdx.y, kv_head = head / (x.q_heads / x.kv_heads),
            begin = blockIdx.x * kQueryBlocks, count = min(kQueryBlocks, x.at.blocks - begin);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kParts = kThreads / D;
  for (int b = 0; b < count; ++b) {
    const int rows = x.at.rows[begin + b], d = threadIdx.x % D;
    const bf16* q = static_cast<const bf16*>(x.q) +
                    static_cast<std::int64_t>(begin + b) * kBlock * x.q_stride + head * D;
    float sum = 0;
    // Threads beyond the last whole part (head dim 96) have no rows.
    for (int i = threadIdx.x < kParts * D ? threadIdx.x / D : rows; i < rows; i += kParts)
      sum += __bfloat162float(q[i * x.q_stride + d]);
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < D) {
      for (int k = 1; k < kParts; ++k) sum += part[k * D + threadIdx.x];
      mean[b][threadIdx.x] = sum / static_cast<float>(max(1, rows));
    }
    if (threadIdx.x == 0) {
      first[b] = x.at.first[begin + b];
      own[b] = rows > 0 ? x.at.own[begin + b] : first[b] - 1;
    }
    __syncthreads();
  }
  int low = INT_MAX, high = -1;
  for (int b = 0; b < count; ++b) {
    if (own[b] < first[b]) continue;
    low = min(low, first[b]);
    high = max(high, own[b]);
  }
  for (int j = low + warp; j <= high; j += kWarps) {
    const std::int64_t key = (static_cast<std::int64_t>(j) * x.kv_heads + kv_head) * D;
    for (int b = 0; b < count; ++b) {
      if (j < first[b] || j > own[b]) continue;  // the same for the whole warp
      const float dot = dot_mean<D>(mean[b], static_cast<const bf16*>(x.high) + key,
                                    static_cast<const bf16*>(x.low) + key, lane);
      if (lane == 0)
        scores[(static_cast<std::int64_t>(head) * x.at.blocks + begin + b) * x.width + j -
               first[b]] = scale * dot;
    }
  }
}

/// The sum over the CTA, in the order of the threads' numbers by halves.
__device__ double add_threads(double mine, double* shared) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) shared[threadIdx.x] += shared[threadIdx.x + step];
    __syncthreads();
  }
  const double sum = shared[0];
  __syncthreads();
  return sum;
}

/// The mean of a segment's observed queries of one head, into mean [D].
template <int D>
__device__ void mean_observed(const Likeness& x, int segment, int head, float* mean) {
  if (threadIdx.x < D) {
    float sum = 0;
    int rows = 0;
    for (int t = x.segment_tile[segment]; t < x.segment_tile[segment + 1]; ++t)
      for (int i = x.tile_rows[t].begin; i < x.tile_rows[t].end; ++i, ++rows)
        sum += __bfloat162float(static_cast<const bf16*>(
            x.q)[((static_cast<std::int64_t>(t) * kBlock + i) * x.q_heads + head) * D +
                 threadIdx.x]);
    mean[threadIdx.x] = sum / static_cast<float>(max(1, rows));
  }
  __syncthreads();
}

/// One CTA: one segment of one head.
template <int D>
__global__ __launch_bounds__(kThreads) void compare_kernel(const Likeness x, const PatternAxes axes,
                                                           double threshold,
                                                           std::uint8_t* by_blocks) {
  extern __shared__ double held[];  // [widest] mass by block, then the scores
  __shared__ float mean[D];
  __shared__ double shared[kThreads];
  float* score = reinterpret_cast<float*>(held + x.widest);
  const int segment = blockIdx.x, head = blockIdx.y, base = axes.segment_slot[segment],
            n = axes.segment_slot[segment + 1] - base;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            kv_head = head / (x.q_heads / x.kv_heads);
  if (axes.whole[segment] != 0 || n == 0 || x.segment_tile[segment] == x.segment_tile[segment + 1])
    return;
  mean_observed<D>(x, segment, head, mean);
  for (int j = warp; j < n; j += kWarps) {
    const std::int64_t key = (static_cast<std::int64_t>(base + j) * x.kv_heads + kv_head) * D;
    const float dot = dot_mean<D>(mean, static_cast<const bf16*>(x.high) + key,
                                  static_cast<const bf16*>(x.low) + key, lane);
    const std::int64_t* columns =
        x.columns + (static_cast<std::int64_t>(head) * axes.slots + base + j) * kBlock;
    long long mass = columns[lane] + columns[lane + 32];
    for (int step = 16; step > 0; step /= 2) mass += __shfl_xor_sync(~0u, mass, step);
    if (lane == 0) {
      score[j] = x.scale * dot;
      held[j] = static_cast<double>(mass);
    }
  }
  __syncthreads();
  float top = -INFINITY;
  for (int j = threadIdx.x; j < n; j += kThreads) top = fmaxf(top, score[j]);
  shared[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) top = fmaxf(top, static_cast<float>(shared[i]));
  __syncthreads();
  double all_estimated = 0, all_held = 0, sum = 0;
  for (int j = threadIdx.x; j < n; j += kThreads) {
    all_estimated += exp(static_cast<double>(score[j]) - top);
    all_held += held[j];
  }
  all_estimated = add_threads(all_estimated, shared);
  all_held = add_threads(all_held, shared);
  for (int j = threadIdx.x; j < n && all_held > 0; j += kThreads) {
    const double p = exp(static_cast<double>(score[j]) - top) / all_estimated,
                 q = held[j] / all_held, middle = (p + q) / 2;
    if (p > 0) sum += p * log(p / middle) / 2;
    if (q > 0) sum += q * log(q / middle) / 2;
  }
  sum = add_threads(sum, shared);
  if (threadIdx.x == 0)
    by_blocks[static_cast<std::int64_t>(head) * axes.slots + base] =
        sqrt(fmax(0.0, sum)) < threshold;
}

/// A thread a column of a head; the first of a slot writes its slash too.
__global__ void impose_kernel(std::int64_t* mass, int heads, const PatternAxes axes,
                              const StaticRule* rules) {
  const std::int64_t columns = static_cast<std::int64_t>(axes.slots) * kBlock,
                     at = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= heads * columns) return;
  const int head = static_cast<int>(at / columns), slot = static_cast<int>(at % columns / kBlock);
  const StaticRule rule = rules[head];
  if (rule.kind == 0) return;
  const int block = slot - axes.segment_slot[axes.slot_segment[slot]],
            key = block * kBlock + static_cast<int>(at % kBlock);
  mass[heads * static_cast<std::int64_t>(axes.slots) + at] =
      rule.kind == 2 && key >= kBlock && key < rule.sink;
  if (at % kBlock == 0)
    mass[static_cast<std::int64_t>(head) * axes.slots + slot] =
        rule.kind == 1 || (rule.kind == 2 && block < rule.window);
}

__global__ void empty_kernel(const std::uint8_t* by_blocks, int heads, const PatternAxes axes,
                             std::int32_t* counts, const ListCuts cuts) {
  const int list = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (list >= heads * axes.segments) return;
  const int head = list / axes.segments, base = axes.segment_slot[list % axes.segments];
  if (base >= axes.slots || by_blocks[static_cast<std::int64_t>(head) * axes.slots + base] == 0 ||
      axes.segment_slot[list % axes.segments + 1] == base)
    return;
  counts[list] = 0;
  cuts.count[list] = 0;
  cuts.share[list] = 0;
}

unsigned ctas(std::int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t score_pooled(const Routing& x, float scale, float* scores, cudaStream_t stream) {
  if (x.kv_heads <= 0 || x.q_heads % x.kv_heads != 0) return cudaErrorInvalidValue;
  if (x.at.blocks == 0 || x.q_heads == 0) return cudaSuccess;
  const dim3 grid((x.at.blocks + kQueryBlocks - 1) / kQueryBlocks, x.q_heads);
  return at_head_dim(x.head_dim, [&](auto d) {
    pooled_kernel<d.value><<<grid, kThreads, 0, stream>>>(x, scale, scores);
    return cudaGetLastError();
  });
}

cudaError_t compare_estimates(const Likeness& x, const PatternAxes& axes, double threshold,
                              std::uint8_t* by_blocks, cudaStream_t stream) {
  if (x.kv_heads <= 0 || x.q_heads % x.kv_heads != 0 || x.widest > kMostScoredBlocks)
    return cudaErrorInvalidValue;
  if (axes.segments == 0 || x.q_heads == 0) return cudaSuccess;
  const int bytes = x.widest * 12;
  return at_head_dim(x.head_dim, [&](auto d) {
    const auto kernel = compare_kernel<d.value>;
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               std::max(bytes, 40 << 10));
    if (e != cudaSuccess) return e;
    kernel<<<dim3(axes.segments, x.q_heads), kThreads, bytes, stream>>>(x, axes, threshold,
                                                                        by_blocks);
    return cudaGetLastError();
  });
}

cudaError_t impose_rules(std::int64_t* mass, int heads, const PatternAxes& axes,
                         const StaticRule* rules, cudaStream_t stream) {
  const std::int64_t threads = static_cast<std::int64_t>(heads) * axes.slots * kBlock;
  if (threads == 0) return cudaSuccess;
  impose_kernel<<<ctas(threads), kThreads, 0, stream>>>(mass, heads, axes, rules);
  return cudaGetLastError();
}

cudaError_t empty_lists(const std::uint8_t* by_blocks, int heads, const PatternAxes& axes,
                        const PatternLists& lists, const ListCuts& cuts, cudaStream_t stream) {
  if (heads * axes.segments == 0) return cudaSuccess;
  empty_kernel<<<ctas(heads * axes.segments), kThreads, 0, stream>>>(by_blocks, heads, axes,
                                                                     lists.counts, cuts);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
