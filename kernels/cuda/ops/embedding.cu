// Embedding look-up, and its gradient without atomics: token ids are sorted (stable, so ascending
// position within an id), then one block adds up each id's rows in that order.
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void forward_kernel(const std::int32_t* ids, const Pack8* table, Pack8* y,
                               std::int64_t packs) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t id = ids[t];
  for (std::int64_t i = threadIdx.x; i < packs; i += kThreads)
    y[t * packs + i] = table[id * packs + i];
}

__global__ void iota_kernel(std::int32_t* x, std::int64_t n) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) x[i] = static_cast<std::int32_t>(i);
}

// Block t works only when it starts a run of equal ids.
__global__ void backward_kernel(const std::int32_t* ids, const std::int32_t* order,
                                const Pack8* d_y, GradientOut d_table, std::int64_t tokens,
                                std::int64_t packs) {
  const std::int64_t first = blockIdx.x;
  const std::int32_t id = ids[first];
  if (first > 0 && ids[first - 1] == id) return;
  std::int64_t last = first + 1;
  while (last < tokens && ids[last] == id) ++last;
  for (std::int64_t i = threadIdx.x; i < packs; i += kThreads) {
    float total[8] = {};
    for (std::int64_t t = first; t < last; ++t) {
      float f[8];
      unpack(d_y[order[t] * packs + i], f);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] += f[j];
    }
    const std::int64_t at = static_cast<std::int64_t>(id) * packs + i;
    if (!d_table.is_float) {
      Pack8& out = static_cast<Pack8*>(d_table.at)[at];
      float sum[8];
      unpack(out, sum);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += total[j];
      out = pack(sum);
      continue;
    }
    float4* out = static_cast<float4*>(d_table.at) + 2 * at;
    float4 a = out[0], b = out[1];
    a.x += total[0], a.y += total[1], a.z += total[2], a.w += total[3];
    b.x += total[4], b.y += total[5], b.z += total[6], b.w += total[7];
    out[0] = a, out[1] = b;
  }
}

std::size_t align(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

std::size_t sort_bytes(std::int64_t tokens) {
  std::size_t bytes = 0;
  cub::DeviceRadixSort::SortPairs(nullptr, bytes, static_cast<const std::int32_t*>(nullptr),
                                  static_cast<std::int32_t*>(nullptr),
                                  static_cast<const std::int32_t*>(nullptr),
                                  static_cast<std::int32_t*>(nullptr), static_cast<int>(tokens));
  return align(bytes);
}

}  // namespace

cudaError_t embedding_forward(const std::int32_t* ids, const Bf16* table, Bf16* y,
                              std::int64_t tokens, std::int64_t width, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  if (width % 8 != 0) return cudaErrorInvalidValue;
  forward_kernel<<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(
      ids, reinterpret_cast<const Pack8*>(table), reinterpret_cast<Pack8*>(y), width / 8);
  return cudaGetLastError();
}

std::size_t embedding_workspace(std::int64_t tokens) {
  return 3 * align(tokens * sizeof(std::int32_t)) + sort_bytes(tokens);
}

cudaError_t embedding_backward(const std::int32_t* ids, const Bf16* d_y, const GradientOut& d_table,
                               std::int64_t tokens, std::int64_t width, void* workspace,
                               std::size_t workspace_bytes, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  if (width % 8 != 0 || workspace_bytes < embedding_workspace(tokens)) return cudaErrorInvalidValue;
  char* at = static_cast<char*>(workspace);
  const std::size_t part = align(tokens * sizeof(std::int32_t));
  auto* positions = reinterpret_cast<std::int32_t*>(at);
  auto* sorted_ids = reinterpret_cast<std::int32_t*>(at + part);
  auto* order = reinterpret_cast<std::int32_t*>(at + 2 * part);
  std::size_t bytes = sort_bytes(tokens);
  iota_kernel<<<static_cast<unsigned>((tokens + 255) / 256), 256, 0, stream>>>(positions, tokens);
  const cudaError_t error =
      cub::DeviceRadixSort::SortPairs(at + 3 * part, bytes, ids, sorted_ids, positions, order,
                                      static_cast<int>(tokens), 0, 32, stream);
  if (error != cudaSuccess) return error;
  backward_kernel<<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(
      sorted_ids, order, reinterpret_cast<const Pack8*>(d_y), d_table, tokens, width / 8);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
