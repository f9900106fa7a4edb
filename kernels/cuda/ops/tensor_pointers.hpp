// Pointers to bf16 and fp32 tensors whose rows of dimension 0 are dense.
#pragma once
#include "core/base/tensor.hpp"
#include "kernels/cuda/ops/ops.hpp"

namespace ballast::cuda {

inline Bf16* bf16_of(const Tensor& x) { return reinterpret_cast<Bf16*>(x.data<ballast::bf16>()); }
/// Null: not defined.
inline float* float_of(const Tensor& x) { return x.defined() ? x.data<float>() : nullptr; }

}  // namespace ballast::cuda
