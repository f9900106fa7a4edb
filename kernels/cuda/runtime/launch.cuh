// Launches that overlap: a kernel's blocks take the places that the last blocks of the kernel
// before leave free, so that no time passes between the two (programmatic dependent launch, compute
// capability 9.0; elsewhere an ordinary launch).
#pragma once
#include <cuda_runtime.h>

#include <utility>

namespace ballast::cuda {

inline constexpr int kMultiprocessors = 132;  // an H200's

/// What every kernel that `launch` starts does first: until all work before it is done and seen.
__device__ inline void await_earlier_work() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // the next one waits likewise
  cudaGridDependencySynchronize();
#endif
}

/// Whether code that awaits is there: a newer GPU may run kernels that were built for an older one
/// alone (BALLAST_CUDA_ARCHITECTURES), which do not.
constexpr bool built_to_overlap() {
  for (const int architecture : {__CUDA_ARCH_LIST__})
    if (architecture >= 900) return true;
  return false;
}

inline bool launches_overlap() {
  static const bool overlap = [] {
    int device = 0, major = 0;
    return built_to_overlap() && cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ==
               cudaSuccess &&
           major >= 9;
  }();
  return overlap;
}

/// As kernel<<<grid, block, shared, stream>>>(arguments): errors are left to cudaGetLastError.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared,
            cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = launches_overlap() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace ballast::cuda
