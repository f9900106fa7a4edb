// A sum over the bits of an array, by which two results are found to be the same.
#include "kernels/cuda/runtime/bits.hpp"

namespace ballast::cuda {
namespace {

constexpr int kThreads = 256, kBlocks = 528;

__global__ void __launch_bounds__(kThreads)
    sum_of_bits_kernel(const unsigned* words, std::size_t n, unsigned long long* sum) {
  unsigned long long total = 0;
  for (std::size_t i = blockIdx.x * std::size_t{kThreads} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads)
    total += (words[i] + 1ull) * (i * 0x9e3779b97f4a7c15ull | 1);  // each place has a weight
  atomicAdd(sum, total);
}

}  // namespace

cudaError_t sum_of_bits(const void* data, std::size_t bytes, unsigned long long* sum,
                        cudaStream_t stream) {
  sum_of_bits_kernel<<<kBlocks, kThreads, 0, stream>>>(static_cast<const unsigned*>(data),
                                                       bytes / sizeof(unsigned), sum);
  return cudaGetLastError();
}

}  // namespace ballast::cuda
