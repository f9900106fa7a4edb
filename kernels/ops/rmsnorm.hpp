// RMSNorm (Zhang and Sennrich 2019, Equation 4) over the last dimension, with the residual addition
// fused in:
//   rstd = 1 / sqrt(mean(x^2) + eps),  y = (x rstd) w
// Shapes: x, branch, y and their gradients [T, H]; w [H]; rstd [T] in f32 (f64 for f64).
#pragma once
#include "core/base/tensor.hpp"
#include "kernels/ops/gradient_target.hpp"

namespace ballast {

/// Overwrites y and rstd.
void rmsnorm_forward(const Tensor& x, const Tensor& w, double eps, Tensor& y, Tensor& rstd);
/// sum = x + branch, then the norm of sum.  Overwrites sum, y and rstd; sum may be x or branch
/// itself.
void add_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                         Tensor& sum, Tensor& y, Tensor& rstd);
/// y again, bit for bit, from x and the kept rstd.
void rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w, Tensor& y);
/// dx = rstd (w dy - xhat mean(w dy xhat)) with xhat = x rstd, added to dx when `accumulate` (the
/// residual path's gradient is there already); dw = or += sum over tokens of dy xhat, summed in
/// fp64 in token order before it is added (on CUDA in fp32, in a fixed order).
void rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& rstd, const Tensor& w,
                      bool accumulate, Tensor& dx, const GradientTarget& dw);

}  // namespace ballast
