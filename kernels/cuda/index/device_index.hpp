// Device mirror of core/plan/attention/attention_pattern.hpp, plus what the kernels derive from it
// on the GPU.
//
// Either upload_index() fills the arrays that a host pattern has, or a GPU builder writes them
// through the pointers.  derive_index() then computes the others (transposed lists, work orders,
// column gathers) on the stream.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

#include "core/plan/attention/device_index.hpp"

namespace ballast::cuda {

/// Capacities that hold `index` exactly.  head_dim matters to deterministic dense attention alone.
IndexShape shape_of(const PatternArrays& index, int q_heads, int kv_heads, int head_dim = 128);
/// Copies the host value by copy(to, from, bytes), host to device in stream order.
using IndexCopy = std::function<cudaError_t(void* to, const void* from, std::size_t bytes)>;
cudaError_t upload_index(const PatternArrays& index, DeviceIndex& device, const IndexCopy& copy);
/// The same by cudaMemcpyAsync, from pageable memory.
cudaError_t upload_index(const PatternArrays& index, DeviceIndex& device, cudaStream_t stream);
/// Computes the derived arrays; those for building may go when it is done.  Call once per index;
/// forward, recomputation and backward share the result.
cudaError_t derive_index(const DeviceIndex& device, cudaStream_t stream);

}  // namespace ballast::cuda
