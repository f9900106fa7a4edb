// What the small kernels share that build or derive lists on the GPU.
#pragma once
#include <climits>
#include <cstdint>

namespace ballast::cuda {

/// First i in [0, n) with predicate(i), for predicates that turn true once.
template <class Predicate>
__device__ inline int first_true(int n, Predicate predicate) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (predicate(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// Sum of what the threads before this one have, in a CTA of 1,024; of all: sums[1023] afterwards.
template <class T>
__device__ inline T sum_of_earlier(T own, T* sums) {
  sums[threadIdx.x] = own;
  __syncthreads();
  for (int step = 1; step < 1024; step *= 2) {
    const T add = static_cast<int>(threadIdx.x) >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += add;
    __syncthreads();
  }
  return sums[threadIdx.x] - own;
}

/// offset[i + 1] = sum of offset[1 .. i + 1], at most `limit`; offset[0] = 0.  One CTA of 1,024
/// threads.
static __global__ void accumulate_offsets(std::int64_t* offset, int n, std::int64_t limit) {
  __shared__ long long sums[1024];
  const int each = (n + 1023) / 1024, first = min(n, static_cast<int>(threadIdx.x) * each),
            last = min(n, first + each);
  long long sum = 0;
  for (int i = first; i < last; ++i) sum += offset[i + 1];
  long long running = sum_of_earlier(sum, sums);
  for (int i = first; i < last; ++i) {
    running += offset[i + 1];
    offset[i + 1] = min(running, static_cast<long long>(limit));
  }
  if (threadIdx.x == 0) offset[0] = 0;
}

}  // namespace ballast::cuda
