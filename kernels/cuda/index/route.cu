// MoBA's routing on the GPU (block_launch.hpp): pooled keys, each query's best blocks by a
// search over the bits of its scores, and the softmax mass of its best blocks by counting scores.
#include <algorithm>

#include "core/plan/attention/coverage.hpp"
#include "core/plan/attention/segment_limits.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/product.cuh"
#include "kernels/cuda/index/block_launch.hpp"

namespace ballast::cuda {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kRows = 16;      // queries of a CTA: a part of a block
constexpr int kThreads = 128;  // four warps share the scores, then take four rows each
constexpr float kUnit = 4294967296.0f;

__global__ void pool_kernel(const bf16* k, std::int64_t k_stride, int columns, const BlockRows at,
                            std::int64_t* sums) {
  const int block = blockIdx.x, rows = at.rows[block];
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    long long sum = 0;
    for (int i = 0; i < rows; ++i)
      sum += __float2ll_rn(
          static_cast<float>(k[(static_cast<std::int64_t>(block) * kBlock + i) * k_stride + c]) *
          kUnit);
    atomicAdd(reinterpret_cast<unsigned long long*>(
                  sums + static_cast<std::int64_t>(at.own[block]) * columns + c),
              static_cast<unsigned long long>(sum));
  }
}

__global__ void mean_kernel(const std::int64_t* sums, const std::int32_t* block_keys,
                            std::int64_t n, int columns, bf16* high, bf16* low) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int keys = block_keys[i / columns];
  const float mean =
      keys > 0
          ? static_cast<float>(static_cast<double>(sums[i]) / (static_cast<double>(kUnit) * keys))
          : 0.0f;
  high[i] = __float2bfloat16(mean);
  low[i] = __float2bfloat16(mean - static_cast<float>(high[i]));
}

/// fp32 as integers of the same order.
__device__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

constexpr int score_stride(int width) { return (width + 7) / 8 * 8 + 4; }

/// Where a CTA's 16 queries lie: the grid has `parts` CTAs a block of 64.
struct Place {
  int block, part, head;
  __device__ explicit Place(int parts)
      : block(blockIdx.x / parts), part(blockIdx.x % parts), head(blockIdx.y) {}
};

/// A CTA's 16 queries against the first `count` pattern blocks of their segment: keep(row,
/// pattern block, q . mean); also a few rows and blocks beyond, up to the next multiple of 8.
template <int D, class Keep>
__device__ __forceinline__ void score_rows(const Routing& x, const Place& place, int count,
                                           Keep&& keep) {
  const auto& [block, part, head] = place;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = 2 * (lane % 4);
  // A lane's eight columns of every 32 lie together, so that it loads 16 bytes: which columns make
  // up a step of the product is free, as long as both operands agree.
  const int first_column = 4 * column;
  const auto pair = [](const bf16* p) { return *reinterpret_cast<const std::uint32_t*>(p); };
  std::uint32_t a[D / 16][4];
  const std::int64_t first_row = static_cast<std::int64_t>(block) * kBlock + part * kRows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const std::int64_t token = min(first_row + lane / 4 + 8 * r, x.tokens - 1);
    const bf16* q = static_cast<const bf16*>(x.q) + token * x.q_stride + head * D + first_column;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      a[k][r] = pair(q + k / 2 * 32 + k % 2 * 4);
      a[k][2 + r] = pair(q + k / 2 * 32 + k % 2 * 4 + 2);
    }
  }
  const std::int64_t key_row = static_cast<std::int64_t>(x.kv_heads) * D;
  const std::int64_t at = static_cast<std::int64_t>(x.at.first[block]) * key_row +
                          head / (x.q_heads / x.kv_heads) * D + first_column;
  for (int tile = warp * 8; tile < count; tile += 32) {
    float acc[4] = {};
    const std::int64_t key = at + min(tile + lane / 4, count - 1) * key_row;
    const bf16 *high = static_cast<const bf16*>(x.high) + key,
               *low = static_cast<const bf16*>(x.low) + key;
#pragma unroll
    for (int k = 0; k < D / 16; k += 2) {
      for (const bf16* mean : {high, low}) {
        const uint4 b = *reinterpret_cast<const uint4*>(mean + 16 * k);
        mma_step(acc, a[k][0], a[k][1], a[k][2], a[k][3], b.x, b.y);
        mma_step(acc, a[k + 1][0], a[k + 1][1], a[k + 1][2], a[k + 1][3], b.z, b.w);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) keep(lane / 4 + 8 * (e / 2), tile + column + e % 2, acc[e]);
  }
}

/// One CTA: 16 rows of one head.  scores [16][stride] and the choices, 16 bits a pattern block, in
/// shared memory; of a row's scores each lane holds `Held`, the first of all.
template <int D, int Held>
__global__ __launch_bounds__(kThreads) void route_kernel(const Routing x, int top_k,
                                                         std::uint16_t* words) {
  extern __shared__ unsigned scores[];
  const int stride = score_stride(x.width);
  unsigned* marks = scores + kRows * stride;
  const Place place(kBlock / kRows);
  const auto& [block, part, head] = place;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int before = x.at.own[block] - x.at.first[block],
            tokens = min(max(x.at.rows[block] - part * kRows, 0), kRows);
  const unsigned rows = (1u << tokens) - 1;
  std::uint16_t* out =
      words + ((static_cast<std::int64_t>(head) * x.at.blocks + block) * x.width) * 4 + part;
  const int wanted = top_k - 1;
  if (wanted >= before || tokens == 0) {  // everything before is chosen
    for (int j = threadIdx.x; j <= before; j += kThreads)
      out[4 * j] = static_cast<std::uint16_t>(rows);
    return;
  }
  for (int j = threadIdx.x; j < before; j += kThreads) marks[j] = 0;
  score_rows<D>(x, place, before,
                [&](int row, int j, float score) { scores[row * stride + j] = ordered(score); });
  __syncthreads();

  for (int row = warp; row < tokens; row += 4) {
    const unsigned* s = scores + row * stride;
    unsigned held[Held], low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < Held; ++i) held[i] = lane + 32 * i < before ? s[lane + 32 * i] : 0;
    for (int j = lane; j < before; j += 32) low = min(low, s[j]), high = max(high, s[j]);
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    // The largest threshold that at least `wanted` scores reach: its first bits are those that all
    // scores share.
    const int open = 32 - __clz(low ^ high);
    unsigned threshold = open < 32 ? high >> open << open : 0;
    for (int bit = open - 1; bit >= 0; --bit) {
      const unsigned candidate = threshold | 1u << bit;
      unsigned reached = 0;
#pragma unroll
      for (int i = 0; i < Held; ++i) reached += held[i] >= candidate;
      for (int j = lane + 32 * Held; j < before; j += 32) reached += s[j] >= candidate;
      reached = __reduce_add_sync(~0u, reached);
      if (static_cast<int>(reached) >= wanted) threshold = candidate;
      if (static_cast<int>(reached) == wanted) break;
    }
    unsigned above = 0;
    for (int j = lane; j < before; j += 32) above += s[j] > threshold;
    int ties = wanted - static_cast<int>(__reduce_add_sync(~0u, above));
    for (int base = 0; base < before; base += 32) {
      const int j = base + lane;
      const unsigned value = j < before ? s[j] : 0;
      const unsigned equal = __ballot_sync(~0u, j < before && value == threshold);
      const bool chosen =
          j < before &&
          (value > threshold || (value == threshold && __popc(equal & ((1u << lane) - 1)) < ties));
      ties -= __popc(equal);
      if (chosen) atomicOr(marks + j, 1u << row);
    }
  }
  __syncthreads();
  for (int j = threadIdx.x; j <= before; j += kThreads)
    out[4 * j] = static_cast<std::uint16_t>(j == before ? rows : marks[j]);
}

constexpr int kLanes = 32, kStepsOfLane = kLogitSteps / kLanes;

/// Where the counts of a lane's steps begin, two steps a word, and the weights of its steps: each
/// lane's in banks of its own.
__device__ int count_word(int step) { return step / 2 + step / kStepsOfLane; }
__device__ int weight_word(int step) { return step + step / kStepsOfLane; }
constexpr int kCountWords = kLogitSteps / 2 + kLanes, kWeightWords = kLogitSteps + kLanes;

/// One CTA: 16 rows of one head.  Each row's scores before its own block are counted by
/// logit_step(); a warp then finds at every budget the mass of the highest ones.
template <int D>
__global__ __launch_bounds__(kThreads) void coverage_kernel(const Routing x,
                                                            const CoverageCurve c) {
  extern __shared__ unsigned long long sums[];  // [4 warps][budgets]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stride = score_stride(x.width);
  float* scores = reinterpret_cast<float*>(sums + 4 * c.budgets);
  unsigned* weights = reinterpret_cast<unsigned*>(scores + kRows * stride);
  unsigned* counts = weights + kWeightWords + warp * kCountWords;
  const Place place(c.told / kRows);
  const auto& [block, part, head] = place;
  const int visible = x.at.own[block] - x.at.first[block] + 1,
            tokens = min(max(x.at.rows[block] - part * kRows, 0), kRows);
  if (tokens == 0) return;
  for (int i = threadIdx.x; i < kLogitSteps; i += kThreads) weights[weight_word(i)] = c.weights[i];
  for (int i = lane; i < c.budgets; i += kLanes) sums[warp * c.budgets + i] = 0;
  score_rows<D>(x, place, visible,
                [&](int row, int j, float score) { scores[row * stride + j] = c.scale * score; });
  __syncthreads();

  for (int row = warp; row < tokens; row += 4) {
    const float* s = scores + row * stride;
    float highest = s[0];
    for (int j = lane; j < visible; j += kLanes) highest = fmaxf(highest, s[j]);
    for (int step = 16; step > 0; step /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
    for (int i = lane; i < kCountWords; i += kLanes) counts[i] = 0;
    __syncwarp();
    const auto step_of = [&](float score) {
      return __float2int_rn(
          fminf((highest - score) * kLogitStepsPerUnit, static_cast<float>(kLogitSteps - 1)));
    };
    for (int j = lane; j < visible - 1; j += kLanes) {
      const int step = step_of(s[j]);
      atomicAdd(counts + count_word(step), 1u << 16 * (step % 2));
    }
    const unsigned own = weights[weight_word(step_of(s[visible - 1]))];
    __syncwarp();
    // Each lane adds up its steps; sums before a lane by a scan.
    const auto steps_of = [&](int of, auto&& visit) {
      for (int i = 0; i < kStepsOfLane; i += 2) {
        const unsigned two = counts[count_word(of * kStepsOfLane + i)];
        visit(two & 0xFFFF, weights[weight_word(of * kStepsOfLane + i)]);
        visit(two >> 16, weights[weight_word(of * kStepsOfLane + i) + 1]);
      }
    };
    unsigned number = 0, mass = 0;
    steps_of(lane, [&](unsigned n, unsigned weight) {
      number += n;
      mass += n * weight;
    });
    unsigned number_through = number, mass_through = mass;
    for (int step = 1; step < kLanes; step *= 2) {
      const unsigned more = __shfl_up_sync(~0u, number_through, step),
                     heavier = __shfl_up_sync(~0u, mass_through, step);
      if (lane >= step) number_through += more, mass_through += heavier;
    }
    const unsigned total = own + __shfl_sync(~0u, mass_through, kLanes - 1),
                   number_before = number_through - number, mass_before = mass_through - mass;
    for (int first = 0; first < c.budgets; first += kLanes) {
      const bool asked = first + lane < c.budgets;
      const unsigned budget =  // beside the own block
          asked ? static_cast<unsigned>(min(c.budget[first + lane] - 1, std::int64_t{1} << 30)) : 0;
      int holds = 0;  // the last lane before whose steps fewer than `budget` scores lie
      for (int step = kLanes / 2; step > 0; step /= 2)
        if (__shfl_sync(~0u, number_before, holds + step) < budget) holds += step;
      unsigned left = budget - __shfl_sync(~0u, number_before, holds),
               reached = own + __shfl_sync(~0u, mass_before, holds);
      steps_of(holds, [&](unsigned n, unsigned weight) {
        const unsigned taken = min(n, left);
        reached += taken * weight;
        left -= taken;
      });
      if (asked)
        sums[warp * c.budgets + first + lane] += static_cast<unsigned long long>(__double2ll_rn(
            static_cast<double>(reached) / static_cast<double>(total) * kCoverageUnit));
    }
    __syncwarp();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < c.budgets; i += kThreads)
    atomicAdd(reinterpret_cast<unsigned long long*>(c.curve) + i,
              sums[i] + sums[c.budgets + i] + sums[2 * c.budgets + i] + sums[3 * c.budgets + i]);
}

bool unfit(const Routing& x) {
  return !attention_head_dim(x.head_dim) || x.kv_heads <= 0 || x.q_heads % x.kv_heads != 0 ||
         x.width > kMostRoutedBlocks || x.q_stride % 2 != 0;
}

/// For 16 of the first `rows` rows of every block and a head a CTA, with this much dynamic shared
/// memory.
template <class Kernel, class... Args>
cudaError_t launch_rows(Kernel kernel, const Routing& x, int rows, int bytes, cudaStream_t stream,
                        Args... args) {
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             std::max(bytes, 48 << 10));
  if (e != cudaSuccess) return e;
  kernel<<<dim3(rows / kRows * x.at.blocks, x.q_heads), kThreads, bytes, stream>>>(x, args...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t pool_keys(const void* k, std::int64_t k_stride, int columns, const BlockRows& keys,
                      std::int64_t* sums, cudaStream_t stream) {
  if (keys.blocks == 0) return cudaSuccess;
  pool_kernel<<<keys.blocks, 256, 0, stream>>>(static_cast<const bf16*>(k), k_stride, columns, keys,
                                               sums);
  return cudaGetLastError();
}

cudaError_t mean_keys(const std::int64_t* sums, const std::int32_t* block_keys, int pattern_blocks,
                      int columns, void* high, void* low, cudaStream_t stream) {
  const std::int64_t n = static_cast<std::int64_t>(pattern_blocks) * columns;
  if (n == 0) return cudaSuccess;
  mean_kernel<<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream>>>(
      sums, block_keys, n, columns, static_cast<bf16*>(high), static_cast<bf16*>(low));
  return cudaGetLastError();
}

cudaError_t route_queries(const Routing& x, int top_k, std::uint64_t* words, cudaStream_t stream) {
  if (unfit(x) || top_k < 1) return cudaErrorInvalidValue;
  const cudaError_t e = cudaMemsetAsync(
      words, 0, static_cast<std::size_t>(x.q_heads) * x.at.blocks * x.width * 8, stream);
  if (e != cudaSuccess || x.at.blocks == 0) return e;
  const int bytes = (kRows * score_stride(x.width) + x.width) * 4;
  return at_head_dim(x.head_dim, [&](auto d) {
    constexpr int kDim = decltype(d)::value;
    return launch_rows(x.width <= 128 ? route_kernel<kDim, 4> : route_kernel<kDim, 16>, x, kBlock,
                       bytes, stream, top_k, reinterpret_cast<std::uint16_t*>(words));
  });
}

cudaError_t route_coverage(const Routing& x, const CoverageCurve& c, cudaStream_t stream) {
  if (unfit(x) || c.budgets < 1 || c.told < kRows || c.told > kBlock || c.told % kRows != 0)
    return cudaErrorInvalidValue;
  if (x.at.blocks == 0) return cudaSuccess;
  const int bytes =
      4 * c.budgets * 8 + (kRows * score_stride(x.width) + kWeightWords + 4 * kCountWords) * 4;
  return at_head_dim(x.head_dim, [&](auto d) {
    return launch_rows(coverage_kernel<decltype(d)::value>, x, c.told, bytes, stream, c);
  });
}

}  // namespace ballast::cuda
