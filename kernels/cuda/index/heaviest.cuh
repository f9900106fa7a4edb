// The heaviest of a list of non-negative numbers, by one CTA: the threshold by a search over its
// bits, three at a time, with exact sums.
#pragma once
#include <climits>
#include <cmath>
#include <cstdint>

namespace ballast::cuda {

inline constexpr int kBits = 3, kSteps = (1 << kBits) - 1;

struct Tally {
  unsigned long long sum;
  unsigned count;
};

/// Adds each thread's tallies over the CTA.
template <int N>
__device__ void add_up(Tally (&mine)[N], Tally* shared) {
  __syncthreads();
  if (threadIdx.x < N) shared[threadIdx.x] = {0, 0};
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) {
    for (int step = 16; step > 0; step /= 2) {
      mine[k].sum += __shfl_xor_sync(~0u, mine[k].sum, step);
      mine[k].count += __shfl_xor_sync(~0u, mine[k].count, step);
    }
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&shared[k].sum, mine[k].sum);
      atomicAdd(&shared[k].count, mine[k].count);
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) mine[k] = shared[k];
}

/// The entries above `threshold` and the first `ties` of those equal to it.
struct Found {
  unsigned long long threshold;
  unsigned above, ties;
  unsigned long long sum;  // of all of them
};

/// The heaviest of v[0, n): no more than `most`, and, unless everything is wanted, only until their
/// sum reaches `target`.  `top`: bits in use.
template <int kThreads>
__device__ Found find(const std::int64_t* v, int n, bool everything, unsigned long long target,
                      unsigned most, int top, Tally* shared) {
  // The largest t >= 1 whose entries v >= t reach the target or number `most`; 0 when none does.
  unsigned long long threshold = 0;
  for (int shift = (top + kBits - 1) / kBits * kBits - kBits; shift >= 0; shift -= kBits) {
    Tally reached[kSteps] = {};
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const unsigned long long x = v[i];
      const unsigned long long steps = x >= threshold ? (x - threshold) >> shift : 0;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (steps > static_cast<unsigned long long>(k)) {
          reached[k].sum += x;
          ++reached[k].count;
        }
      }
    }
    add_up(reached, shared);
    int step = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if ((!everything && reached[k].sum >= target) || reached[k].count >= most) step = k + 1;
    }
    threshold += static_cast<unsigned long long>(step) << shift;
  }
  Tally above[1] = {}, equal[1] = {};
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const unsigned long long x = v[i];
    if (x > threshold) {
      above[0].sum += x;
      ++above[0].count;
    }
    equal[0].count += x == threshold;
  }
  add_up(above, shared);
  add_up(equal, shared);
  unsigned long long wanted = equal[0].count;
  if (!everything)
    wanted = threshold == 0
                 ? 0
                 : min(wanted, (target - min(target, above[0].sum) + threshold - 1) / threshold);
  const unsigned room = most > above[0].count ? most - above[0].count : 0;
  const auto ties = static_cast<unsigned>(min(wanted, static_cast<unsigned long long>(room)));
  return {threshold, above[0].count, ties, above[0].sum + ties * threshold};
}

/// Sum of a list, and bits in use.
struct Whole {
  unsigned long long sum;
  int bits;
};
template <int kThreads>
__device__ Whole add_list(const std::int64_t* v, int n, Tally* shared) {
  __shared__ unsigned long long used;
  Tally all[1] = {};
  unsigned long long bits = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    all[0].sum += v[i];
    bits |= v[i];
  }
  if (threadIdx.x == 0) used = 0;
  add_up(all, shared);
  atomicOr(&used, bits);
  __syncthreads();
  return {all[0].sum, used == 0 ? 0 : 64 - __clzll(static_cast<long long>(used))};
}
/// The sum that a share below 1 asks for; of nothing, nothing is chosen.
__device__ inline unsigned long long target_of(double share, unsigned long long total) {
  return max(
      min(max(static_cast<unsigned long long>(ceil(share * static_cast<double>(total))), 1ull),
          total),
      1ull);
}

}  // namespace ballast::cuda
