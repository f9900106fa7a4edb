// A parameter's gradient as kernels write it.
#pragma once
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/ops/gradient_target.hpp"

namespace ballast::cuda {

inline GradientOut out_of(const GradientTarget& target) {
  if (!target.defined()) return {};
  const DType type = target.tensor.dtype();
  require(type == DType::f32 || type == DType::bf16, "CUDA gradient of a parameter in {}",
          name(type));
  return {target.tensor.raw(), type == DType::f32, target.accumulate};
}

}  // namespace ballast::cuda
