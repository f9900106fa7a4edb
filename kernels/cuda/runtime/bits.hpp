// A sum over the bits of an array, by which two results are found to be the same.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace ballast::cuda {

/// sum[0] += a sum over the whole 4-byte words of data, each weighed by its place; on the device.
cudaError_t sum_of_bits(const void* data, std::size_t bytes, unsigned long long* sum,
                        cudaStream_t stream);

}  // namespace ballast::cuda
