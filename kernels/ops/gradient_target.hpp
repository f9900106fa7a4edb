// Where an operation puts the gradient of a parameter.
#pragma once
#include <utility>

#include "core/base/tensor.hpp"

namespace ballast {

/// The operation adds to `tensor` or, as the first of a step (`accumulate` false), overwrites it,
/// so that nobody has to zero it.  An undefined tensor belongs to a frozen parameter: nothing is
/// done.
struct GradientTarget {
  GradientTarget(Tensor t, bool adds = true) : tensor(std::move(t)), accumulate(adds) {}
  bool defined() const { return tensor.defined(); }
  /// f32 (f64 for f64 inputs), or bf16: sums are rounded to nearest, on GPUs a product of matrices
  /// before it is added too.
  Tensor tensor;
  bool accumulate;
};

}  // namespace ballast
