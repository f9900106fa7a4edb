// Head dims that the attention kernels and the builders of patterns are written for.
#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

namespace ballast::cuda {

constexpr bool attention_head_dim(int d) { return d == 64 || d == 96 || d == 128 || d == 256; }

/// f(head dim) with the head dim as a constant of the compiler.
template <class F>
cudaError_t at_head_dim(int head_dim, F f) {
  switch (head_dim) {
    case 64:
      return f(std::integral_constant<int, 64>());
    case 96:
      return f(std::integral_constant<int, 96>());
    case 128:
      return f(std::integral_constant<int, 128>());
    case 256:
      return f(std::integral_constant<int, 256>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ballast::cuda
