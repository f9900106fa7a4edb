// What the observation queries look at (attention_pattern.hpp): three passes over a shard's keys,
// 64 x 64 scores at a time.
#include <cmath>

#include "core/plan/context/axis_range.hpp"
#include "kernels/cuda/attention/product.cuh"
#include "kernels/cuda/index/slash_launch.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = kProductThreads;
constexpr int kKeyTiles = 4;  // key blocks of a CTA
constexpr int kMaxGroup = 16;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kOne = static_cast<float>(1ll << kMassBits);

__device__ void atomic_max(float* to, float x) {
  if (x >= 0) {
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(x));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(to),
              __float_as_uint(x));  // among negative numbers more bits are less
  }
}
__device__ void add_fixed(std::int64_t* to, long long x) {
  if (x != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
/// exp(x - top) in fixed point, times `factor`.
__device__ long long fixed_exp(float x, float top, float factor) {
  return __float2ll_rn(exp2f((x - top) * kLog2E) * factor);
}

enum class Pass { maximum, sum, mass };

struct ObserveParams {
  Observation x;
  PatternAxes axes;  // mass only
  float* top;
  std::int64_t* sum;
  std::int64_t* columns;
  std::int64_t* slashes;
};

/// One CTA: one observation tile, kKeyTiles key blocks, the query heads of one key head.
template <int D, Pass kPass>
__global__ __launch_bounds__(kThreads) void observe_kernel(const ObserveParams p) {
  constexpr int kColumns = product_columns(D);
  __shared__ Tile<kColumns> queries, keys;
  __shared__ Interval visible[kBlock];
  __shared__ float row_top[kBlock], row_factor[kBlock];
  __shared__ float best[kPass == Pass::maximum ? kMaxGroup : 1][kBlock];
  __shared__ long long total[kPass == Pass::sum ? kMaxGroup : 1][kBlock];
  const Observation& x = p.x;
  const int group = x.q_heads / x.kv_heads, kv_head = blockIdx.z, tile = blockIdx.y;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4,
            column = 2 * (lane % 4);
  if (threadIdx.x < kBlock)
    visible[threadIdx.x] = x.visible[static_cast<std::int64_t>(tile) * kBlock + threadIdx.x];
  for (int i = threadIdx.x; i < kMaxGroup * kBlock; i += kThreads) {
    if constexpr (kPass == Pass::maximum) best[i / kBlock][i % kBlock] = -INFINITY;
    if constexpr (kPass == Pass::sum) total[i / kBlock][i % kBlock] = 0;
  }
  __syncthreads();

  for (int t = 0; t < kKeyTiles; ++t) {
    const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kKeyTiles + t) * kBlock;
    const bool seen =
        threadIdx.x < kBlock && visible[threadIdx.x].begin < min(first + kBlock, x.k_tokens) &&
        visible[threadIdx.x].end > first && visible[threadIdx.x].begin < visible[threadIdx.x].end;
    if (!__syncthreads_or(seen)) continue;
    const auto load_keys = [&](int c) {
      keys.load(static_cast<const __nv_bfloat16*>(x.k) + first * x.k_stride + kv_head * D + c,
                x.k_stride,
                static_cast<int>(min(static_cast<std::int64_t>(kBlock), x.k_tokens - first)));
    };
    if (kColumns == D) load_keys(0);
    for (int g = 0; g < group; ++g) {
      const int head = kv_head * group + g;
      const std::int64_t statistics = (static_cast<std::int64_t>(head) * x.tiles + tile) * kBlock;
      if (kPass != Pass::maximum && threadIdx.x < kBlock) {
        row_top[threadIdx.x] = p.top[statistics + threadIdx.x];
        if (kPass == Pass::mass) {
          const std::int64_t s = p.sum[statistics + threadIdx.x];
          row_factor[threadIdx.x] =
              s > 0 ? static_cast<float>(static_cast<double>(kOne) * kOne / static_cast<double>(s))
                    : 0.0f;
        }
      }
      float acc[8][4] = {};
      for (int c = 0; c < D; c += kColumns) {
        if (c > 0) __syncthreads();
        if (kColumns < D) load_keys(c);
        queries.load(static_cast<const __nv_bfloat16*>(x.q) +
                         (static_cast<std::int64_t>(tile) * kBlock * x.q_heads + head) * D + c,
                     static_cast<std::int64_t>(x.q_heads) * D, kBlock);
        __syncthreads();
        // Of masses, rows are keys, so that a column's mass is a sum along a row.
        add_product(acc, kPass == Pass::mass ? keys : queries,
                    kPass == Pass::mass ? queries : keys);
      }
      if constexpr (kPass == Pass::mass) {
        long long mass[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int q = 8 * j + column + e % 2;
            const std::int64_t key = first + row + 8 * (e / 2);
            if (key >= visible[q].begin && key < visible[q].end)
              mass[e / 2] += fixed_exp(acc[j][e] * x.scale, row_top[q], row_factor[q]);
          }
        }
        long long slash = mass[0] + mass[1];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          mass[r] += __shfl_xor_sync(~0u, mass[r], 1);
          mass[r] += __shfl_xor_sync(~0u, mass[r], 2);
        }
        for (int step = 1; step < 32; step *= 2) slash += __shfl_xor_sync(~0u, slash, step);
        const int slot = p.axes.key_slot[first / kBlock],
                  base = p.axes.segment_slot[p.axes.slot_segment[slot]];
        if (lane % 4 == 0) {
          const int part = x.part == nullptr ? 0 : x.part[tile];
          std::int64_t* out =
              p.columns +
              ((static_cast<std::int64_t>(part) * x.q_heads + head) * p.axes.slots + slot) * kBlock;
          add_fixed(out + row, mass[0]);
          add_fixed(out + row + 8, mass[1]);
        }
        if (lane == 0)
          add_fixed(p.slashes + static_cast<std::int64_t>(head) * p.axes.slots + base +
                        x.slot[tile] - slot,
                    slash);
      } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int q = row + 8 * r;
          float most = -INFINITY;
          long long added = 0;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const std::int64_t key = first + 8 * j + column + e;
              if (key < visible[q].begin || key >= visible[q].end) continue;
              const float score = acc[j][2 * r + e] * x.scale;
              if constexpr (kPass == Pass::maximum) most = fmaxf(most, score);
              if constexpr (kPass == Pass::sum) added += fixed_exp(score, row_top[q], kOne);
            }
          }
          for (int step = 1; step < 4; step *= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            added += __shfl_xor_sync(~0u, added, step);
          }
          if (lane % 4 == 0) {
            if constexpr (kPass == Pass::maximum) best[g][q] = fmaxf(best[g][q], most);
            if constexpr (kPass == Pass::sum) total[g][q] += added;
          }
        }
      }
      __syncthreads();
    }
  }
  if constexpr (kPass != Pass::mass) {
    for (int i = threadIdx.x; i < group * kBlock; i += kThreads) {
      const std::int64_t at =
          (static_cast<std::int64_t>(kv_head * group + i / kBlock) * x.tiles + tile) * kBlock +
          i % kBlock;
      if constexpr (kPass == Pass::maximum) {
        if (best[i / kBlock][i % kBlock] != -INFINITY)
          atomic_max(p.top + at, best[i / kBlock][i % kBlock]);
      } else {
        add_fixed(p.sum + at, total[i / kBlock][i % kBlock]);
      }
    }
  }
}

template <Pass kPass>
cudaError_t launch(const ObserveParams& p, cudaStream_t stream) {
  const Observation& x = p.x;
  if (!attention_head_dim(x.head_dim) || x.kv_heads <= 0 || x.q_heads % x.kv_heads != 0 ||
      x.q_heads / x.kv_heads > kMaxGroup || x.k_stride % 2 != 0 || x.scale <= 0) {
    return cudaErrorInvalidValue;
  }
  if (x.tiles == 0 || x.k_tokens == 0) return cudaSuccess;
  const std::int64_t chunk = kKeyTiles * kBlock;
  const dim3 grid(static_cast<unsigned>((x.k_tokens + chunk - 1) / chunk), x.tiles, x.kv_heads);
  return at_head_dim(x.head_dim, [&](auto d) {
    observe_kernel<decltype(d)::value, kPass><<<grid, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t observe_maximum(const Observation& x, float* top, cudaStream_t stream) {
  return launch<Pass::maximum>({x, {}, top, nullptr, nullptr, nullptr}, stream);
}
cudaError_t observe_sum(const Observation& x, const float* top, std::int64_t* sum,
                        cudaStream_t stream) {
  return launch<Pass::sum>({x, {}, const_cast<float*>(top), sum, nullptr, nullptr}, stream);
}
cudaError_t observe_mass(const Observation& x, const PatternAxes& axes, const float* top,
                         const std::int64_t* sum, std::int64_t* columns, std::int64_t* slashes,
                         cudaStream_t stream) {
  return launch<Pass::mass>(
      {x, axes, const_cast<float*>(top), const_cast<std::int64_t*>(sum), columns, slashes}, stream);
}

}  // namespace ballast::cuda
