// QK-norm (Henry et al. 2020; Qwen3): RMSNorm of every head of q and of k before rotation,
//   y = x / sqrt(mean(x^2) + eps) w,  the mean over a head, w [D] shared by all heads of q (of k),
// in one pass with the rotation of kernels/ops/rope.hpp.
// Shapes: x [T, Hq + Hkv or more, D] with q before k, rows may lie apart; w_q, w_k [D]; cos, sin
// [T, D/2].
#pragma once
#include "core/base/tensor.hpp"
#include "kernels/ops/gradient_target.hpp"

namespace ballast {

/// The weights of a layer.
struct QkNormWeights {
  Tensor q, k;  ///< [D]; undefined where the model has no QK-norm
  double eps = 1e-6;
};

/// Overwrites y [T, Hq + Hkv, D], dense, with q and k normed and turned.  Kept nothing: the same
/// call makes it again bit for bit.
void qk_norm_rope(const Tensor& x, std::int64_t query_heads, const QkNormWeights& w,
                  const Tensor& cos, const Tensor& sin, Tensor& y);
/// rope_backward (which see for dq, dk, dv and d_qkv) and then the norm's: rows of q and k in d_qkv
/// are gradients of x.  The weights' gradients are summed over tokens and heads in a fixed order,
/// in fp64 (on CUDA in fp32).
void qk_norm_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& x,
                           const QkNormWeights& w, const Tensor& cos, const Tensor& sin,
                           Tensor& d_qkv, const GradientTarget& d_w_q, const GradientTarget& d_w_k);

}  // namespace ballast
