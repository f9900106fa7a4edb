// Linear layer (matrix product): y = x w^T + b.  Host: BLAS.  Input and weight gradients are
// separate, so that a schedule may delay the latter (zero-bubble pipelines). Shapes: x [T, in], w
// [out, in] as in Hugging Face, b [out], y [T, out].  Rows of x, y and their gradients may lie
// apart.
#pragma once
#include "core/base/tensor.hpp"
#include "kernels/ops/gradient_target.hpp"

namespace ballast {

/// How a product reaches its output: times `scale`, in place of what is there or added to it.
struct ProductOut {
  double scale = 1;
  bool accumulate = false;
};

/// y = x w^T (+ bias where defined, with the default `out` alone).
void linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias, Tensor& y,
                    const ProductOut& out = {});
/// dx = dy w.
void linear_input_gradient(const Tensor& dy, const Tensor& w, Tensor& dx,
                           const ProductOut& out = {});
/// dw = or += dy^T x.
void linear_weight_gradient(const Tensor& x, const Tensor& dy, const GradientTarget& dw);
/// db = or += sum of dy over tokens, summed in fp64 in token order before it is added.
void linear_bias_gradient(const Tensor& dy, const GradientTarget& db);

/// Floating-point operations of y = x w^T over `tokens` rows; each of the two gradients costs the
/// same.
inline double linear_flops(double tokens, double in, double out) { return 2.0 * tokens * in * out; }

}  // namespace ballast
