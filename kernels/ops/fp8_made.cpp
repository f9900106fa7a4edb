#include "kernels/ops/fp8_made.hpp"

#include "core/model/fp8_specs.hpp"
#include "kernels/ops/backend.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/swiglu.hpp"

namespace ballast {
namespace {

constexpr const char *kInput = "fp8 input", *kGradient = "fp8 gradient";

/// A result before it is rounded.
Tensor made(const char* name, std::int64_t tokens, std::int64_t width, const Tensor& like,
            Workspace& workspace) {
  return workspace.take(name, {tokens, width}, like.dtype());
}

/// Of q, k and v: on a GPU dq is sums in fp32, and what they become is bf16.
Tensor made_gradient(const Tensor& dq, std::int64_t width, Workspace& workspace) {
  const DType type = dq.space() == Space::host ? dq.dtype() : DType::bf16;
  return workspace.take(kFp8MadeGradient, {dq.size(0), width}, type);
}

#ifdef BALLAST_HAVE_CUDA
bool on_cuda(const Tensor& x) { return x.space() == Space::cuda; }
#endif

}  // namespace

Fp8Tokens fp8_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                              Tensor& sum, Tensor& rstd, Workspace& workspace) {
#ifdef BALLAST_HAVE_CUDA
  if (on_cuda(x)) {
    Fp8Tokens rounded =
        fp8_tokens_memory(x.size(0), x.size(1), x, Fp8Sides::rows, kInput, workspace);
    cuda::fp8_rmsnorm_forward(x, branch, w, eps, sum, rstd, rounded);
    return rounded;
  }
#endif
  Tensor y = made(kFp8Made, x.size(0), x.size(1), x, workspace);
  if (branch.defined())
    add_rmsnorm_forward(x, branch, w, eps, sum, y, rstd);
  else
    rmsnorm_forward(x, w, eps, y, rstd);
  return fp8_round(y, Fp8Sides::rows, kInput, workspace);
}

Fp8Tokens fp8_rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w,
                                Workspace& workspace) {
#ifdef BALLAST_HAVE_CUDA
  if (on_cuda(x)) {
    Fp8Tokens rounded =
        fp8_tokens_memory(x.size(0), x.size(1), x, Fp8Sides::columns, kInput, workspace);
    cuda::fp8_rmsnorm_recompute(x, rstd, w, rounded);
    return rounded;
  }
#endif
  Tensor y = made(kFp8Made, x.size(0), x.size(1), x, workspace);
  rmsnorm_recompute(x, rstd, w, y);
  return fp8_round(y, Fp8Sides::columns, kInput, workspace);
}

Fp8Tokens fp8_swiglu_forward(const Tensor& gate_up, Workspace& workspace) {
  const std::int64_t tokens = gate_up.size(0), width = gate_up.size(1) / 2;
#ifdef BALLAST_HAVE_CUDA
  if (on_cuda(gate_up)) {
    Fp8Tokens rounded =
        fp8_tokens_memory(tokens, width, gate_up, Fp8Sides::rows, kInput, workspace);
    if (tokens > 0) cuda::fp8_swiglu_forward(gate_up, rounded);
    return rounded;
  }
#endif
  Tensor y = made(kFp8Made, tokens, width, gate_up, workspace);
  swiglu_forward(gate_up, y);
  return fp8_round(y, Fp8Sides::rows, kInput, workspace);
}

Fp8SwigluGradient fp8_swiglu_backward(const Tensor& gate_up, const Tensor& dy,
                                      Workspace& workspace) {
  const std::int64_t tokens = dy.size(0), width = dy.size(1);
#ifdef BALLAST_HAVE_CUDA
  if (on_cuda(dy) && fp8_rounds_swiglu(width)) {
    Fp8SwigluGradient rounded{
        fp8_tokens_memory(tokens, width, dy, Fp8Sides::columns, kInput, workspace),
        fp8_tokens_memory(tokens, 2 * width, dy, Fp8Sides::both, kGradient, workspace)};
    if (tokens > 0) cuda::fp8_swiglu_backward(gate_up, dy, rounded);
    return rounded;
  }
#endif
  Tensor product = made(kFp8Made, tokens, width, dy, workspace),
         d = made(kFp8MadeGradient, tokens, 2 * width, dy, workspace);
  swiglu_forward(gate_up, product);
  swiglu_backward(gate_up, dy, d);
  return {fp8_round(product, Fp8Sides::columns, kInput, workspace),
          fp8_round(d, Fp8Sides::both, kGradient, workspace)};
}

Fp8Tokens fp8_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                            const Tensor& sin, const GradientTarget& d_bias, Workspace& workspace) {
  const std::int64_t tokens = dq.size(0), width = (dq.size(1) + 2 * dk.size(1)) * dq.size(2);
#ifdef BALLAST_HAVE_CUDA
  if (on_cuda(dq) && fp8_rounds_rope(dq.size(2))) {
    Fp8Tokens rounded = fp8_tokens_memory(tokens, width, dq, Fp8Sides::both, kGradient, workspace);
    cuda::fp8_rope_backward(dq, dk, dv, cos, sin, d_bias, rounded);
    return rounded;
  }
#endif
  Tensor d = made_gradient(dq, width, workspace);
  rope_backward(dq, dk, dv, cos, sin, d);
  linear_bias_gradient(d, d_bias);
  return fp8_round(d, Fp8Sides::both, kGradient, workspace);
}

Fp8Tokens fp8_qk_norm_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                    const Tensor& x, const QkNormWeights& w, const Tensor& cos,
                                    const Tensor& sin, const GradientTarget& d_w_q,
                                    const GradientTarget& d_w_k, Workspace& workspace) {
  Tensor d = made_gradient(dq, (dq.size(1) + 2 * dk.size(1)) * dq.size(2), workspace);
  qk_norm_rope_backward(dq, dk, dv, x, w, cos, sin, d, d_w_q, d_w_k);
  return fp8_round(d, Fp8Sides::both, kGradient, workspace);
}

}  // namespace ballast
