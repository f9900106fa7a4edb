// Cross-entropy on Hopper: a cluster of CTAs holds a row of logits in its registers, so that they
// are read once, and the gradient is written over them once.  The CTAs exchange maximum and sum
// through distributed shared memory, always in the same order.
#include <cooperative_groups.h>

#include <algorithm>

#include "kernels/cuda/ops/cross_entropy.cuh"

namespace ballast::cuda {
namespace {
namespace cg = cooperative_groups;

constexpr int kEasyVectors = 5;  // with which two CTAs fit a multiprocessor

struct Rows {
  const Pack8* logits;
  Pack8* gradient;  // null: none; may be logits
  const std::int32_t* targets;
  float* loss;
  float* lse;
  float scale;
  const float* weights;
  int vectors;  // of a row
};

/// The cluster's sum from its CTAs' own, on every thread.
__device__ OnlineSum join(const cg::cluster_group& cluster, const OnlineSum& own, OnlineSum& shared,
                          OnlineSum (&all)[kMaxCluster]) {
  if (threadIdx.x == 0) shared = own;
  cluster.sync();
  const int ranks = static_cast<int>(cluster.num_blocks());
  if (static_cast<int>(threadIdx.x) < ranks)
    all[threadIdx.x] = *cluster.map_shared_rank(&shared, threadIdx.x);
  __syncthreads();
  OnlineSum sum;
  for (int r = 0; r < ranks; ++r) sum.best = fmaxf(sum.best, all[r].best);
  for (int r = 0; r < ranks; ++r) sum.total += all[r].under(sum.best);
  return sum;
}

template <int kVectors>
__global__ void __launch_bounds__(kClusterThreads, kVectors > kEasyVectors ? 1 : 2)
    cluster_kernel(const Rows x) {
  __shared__ float scratch[32];
  __shared__ OnlineSum shared, all[kMaxCluster];
  const cg::cluster_group cluster = cg::this_cluster();
  const int ranks = static_cast<int>(cluster.num_blocks()),
            rank = static_cast<int>(cluster.block_rank());
  const std::int64_t row = blockIdx.x / ranks;
  const std::int32_t target = x.targets[row];
  const int slice = (x.vectors + ranks - 1) / ranks, begin = rank * slice,
            end = min(begin + slice, x.vectors);
  const std::int64_t at = row * x.vectors;
  const int first = begin + static_cast<int>(threadIdx.x);
  if (target < 0) {  // the same for the whole cluster
    if (rank == 0 && threadIdx.x == 0) x.loss[row] = 0, x.lse[row] = 0;
    for (int i = first; x.gradient != nullptr && i < end; i += kClusterThreads)
      x.gradient[at + i] = Pack8{};
    return;
  }
  Pack8 held[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = first + j * kClusterThreads;
    if (i < end) held[j] = x.logits[at + i];
  }
  // Read before the barrier of join(), behind which gradients are written.
  float own = 0;
  if (rank == 0 && threadIdx.x == 0)
    own = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(x.logits + at)[target]);
  OnlineSum sum;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kClusterThreads >= end) continue;
    float f[8];
    unpack(held[j], f);
    sum.take(f);
  }
  sum.reduce(scratch);
  const float offset = join(cluster, sum, shared, all).lse();
  if (rank == 0 && threadIdx.x == 0) {
    x.lse[row] = offset;
    x.loss[row] = offset - own;
  }
  const float factor = x.weights != nullptr ? x.scale * x.weights[row] : x.scale;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int i = first + j * kClusterThreads;
    if (x.gradient == nullptr || i >= end) continue;
    float f[8];
    unpack(held[j], f);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      f[e] = factor * (__expf(f[e] - offset) - (8 * i + e == target ? 1.0f : 0.0f));
    x.gradient[at + i] = pack(f);
  }
  cluster.sync();  // its shared memory is read by the others
}

template <int kVectors>
cudaError_t launch(const Rows& x, std::int64_t rows, int ranks, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * ranks));
  config.blockDim = dim3(kClusterThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, cluster_kernel<kVectors>, x);
}

}  // namespace

cudaError_t cross_entropy_sm90(const Bf16* logits, Bf16* gradient, const std::int32_t* targets,
                               float* loss, float* lse, float scale, const float* weights,
                               std::int64_t rows, std::int64_t vocabulary, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const Rows x{reinterpret_cast<const Pack8*>(logits),
               reinterpret_cast<Pack8*>(gradient),
               targets,
               loss,
               lse,
               scale,
               weights,
               static_cast<int>(vocabulary / 8)};
  int ranks = 1;
  const auto held = [&] {
    return ((x.vectors + ranks - 1) / ranks + kClusterThreads - 1) / kClusterThreads;
  };
  while (ranks < kMaxCluster && held() > kEasyVectors) ranks *= 2;
  return held() <= 2              ? launch<2>(x, rows, ranks, stream)
         : held() <= kEasyVectors ? launch<kEasyVectors>(x, rows, ranks, stream)
                                  : launch<kHeldVectors>(x, rows, ranks, stream);
}

}  // namespace ballast::cuda
