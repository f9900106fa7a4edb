// Backend choice at an operation's entry: tensors on the GPU go to the operation's twin in
// kernels/cuda, all others to the host implementation beside the entry.
#pragma once
#include "core/base/tensor.hpp"

#ifdef BALLAST_HAVE_CUDA
#include "kernels/cuda/ops/operations.hpp"
/// Leaves the calling function with `cuda::call` when `tensor` lies on the GPU.
#define BALLAST_ON_CUDA(tensor, call) \
  if ((tensor).space() == ::ballast::Space::cuda) return ::ballast::cuda::call
#else
#define BALLAST_ON_CUDA(tensor, call)                                                              \
  if ((tensor).space() == ::ballast::Space::cuda)                                                  \
  ::ballast::fail(                                                                                 \
      "{}: the tensor lies on a GPU, but this program was built without CUDA; rebuild where nvcc " \
      "is found or use the host backend",                                                          \
      __func__)
#endif
