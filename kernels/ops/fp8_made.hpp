// Operations whose results only FP8 products read, rounded where they are made: a GPU writes no
// bf16 in between.  Bits are those of the operation and fp8_round one after the other, which is
// what the host does, and a GPU where rounding needs a block that one pass does not have.
#pragma once
#include "kernels/ops/fp8.hpp"
#include "kernels/ops/qk_norm.hpp"

namespace ballast {

/// Inputs of products are called "fp8 input", gradients of their outputs "fp8 gradient"
/// (fp8_round).

/// rmsnorm_forward (kernels/ops/rmsnorm.hpp) by rows, of x + branch where branch is defined: that
/// sum is written to `sum`.
Fp8Tokens fp8_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                              Tensor& sum, Tensor& rstd, Workspace& workspace);
/// rmsnorm_recompute by columns.
Fp8Tokens fp8_rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w,
                                Workspace& workspace);

/// swiglu_forward (kernels/ops/swiglu.hpp) by rows.
Fp8Tokens fp8_swiglu_forward(const Tensor& gate_up, Workspace& workspace);
struct Fp8SwigluGradient {
  Fp8Tokens product, gate_up;
};
/// swiglu_backward by both sides, and the product again by columns.
Fp8SwigluGradient fp8_swiglu_backward(const Tensor& gate_up, const Tensor& dy,
                                      Workspace& workspace);

/// rope_backward (kernels/ops/rope.hpp) by both sides, and linear_bias_gradient of it.
Fp8Tokens fp8_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                            const Tensor& sin, const GradientTarget& d_bias, Workspace& workspace);

/// qk_norm_rope_backward (kernels/ops/qk_norm.hpp) by both sides.
Fp8Tokens fp8_qk_norm_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                    const Tensor& x, const QkNormWeights& w, const Tensor& cos,
                                    const Tensor& sin, const GradientTarget& d_w_q,
                                    const GradientTarget& d_w_k, Workspace& workspace);

}  // namespace ballast
