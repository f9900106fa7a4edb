// Tensors of kernels/ops/fp8.hpp as arguments of the rounding kernels and of cuBLASLt.
#include "kernels/cuda/ops/gradient_out.hpp"
#include "kernels/cuda/ops/operations.hpp"
#include "kernels/cuda/ops/ops.hpp"
#include "kernels/cuda/ops/tensor_pointers.hpp"
#include "kernels/cuda/runtime/device.hpp"
#include "kernels/ops/fp8_made.hpp"

namespace ballast::cuda {
namespace {

std::uint8_t* bytes_of(const Tensor& x) { return x.defined() ? x.data<std::uint8_t>() : nullptr; }

/// Elements between the rows, which hold 16-byte pieces.
std::int64_t aligned_stride(const Tensor& x) {
  require(x.rank() == 2 && x.strides()[1] == 1 && x.strides()[0] % 8 == 0 && x.size(1) % 8 == 0,
          "FP8 rounding on CUDA needs dense rows of a multiple of 8, got shape {}",
          to_string(x.shape()));
  return x.strides()[0];
}

void require_whole(const Tensor& x) {
  require(x.contiguous() && x.size(1) % 8 == 0,
          "FP8 rounding on CUDA needs whole, dense rows of a multiple of 8, got shape {}",
          to_string(x.shape()));
}

Fp8Target target(const Fp8Tokens& x) {
  return {.rows = x.tokens,
          .width = x.width,
          .bytes = bytes_of(x.rows),
          .scales = float_of(x.row_scales),
          .rows_padded = x.rows.defined() ? x.rows.size(0) : 0,
          .transposed = bytes_of(x.columns),
          .transposed_scales = float_of(x.column_scales),
          .columns_padded = x.columns.defined() ? x.columns.size(1) : 0};
}

/// y [T, n] = x bytes [T, k] times the weight bytes [n, k]^T.
void product(const Fp8Tokens& x, const Tensor& bytes, const Tensor& scales, Tensor& y,
             Workspace& workspace) {
  const std::int64_t tokens = x.rows.size(0);  // a multiple of kFp8Rows
  const bool direct = y.size(0) == tokens && y.contiguous();
  Tensor target = direct ? y : workspace.take(kFp8Output, {tokens, y.size(1)}, y.dtype());
  gemm(Fp8Gemm{.m = tokens,
               .n = y.size(1),
               .k = x.width,
               .a = bytes_of(x.rows),
               .a_scales = float_of(x.row_scales),
               .b = bytes_of(bytes),
               .b_scales = float_of(scales),
               .b_blocks = true,
               .c = bf16_of(target)});
  if (!direct) copy_rows(target.rows(0, y.size(0)), y);
}

}  // namespace

void fp8_round_weight(const Tensor& weight, Fp8Weight& rounded) {
  check(
      fp8_round_weight(bf16_of(weight), aligned_stride(weight), rounded.out, rounded.in,
                       bytes_of(rounded.bytes), float_of(rounded.scales),
                       bytes_of(rounded.transposed), float_of(rounded.transposed_scales), stream()),
      "FP8 rounding of a weight");
}

void fp8_round(const Tensor& x, Fp8Tokens& rounded) {
  check(fp8_round(bf16_of(x), aligned_stride(x), target(rounded), stream()), "FP8 rounding");
}

void fp8_rmsnorm_forward(const Tensor& x, const Tensor& branch, const Tensor& w, double eps,
                         Tensor& sum, Tensor& rstd, Fp8Tokens& rounded) {
  for (const Tensor* t : {&x, &branch, static_cast<const Tensor*>(&sum)})
    if (t->defined()) require_whole(*t);
  check(fp8_rmsnorm(bf16_of(x), branch.defined() ? bf16_of(branch) : nullptr, bf16_of(w), eps,
                    bf16_of(sum), float_of(rstd), target(rounded), stream()),
        "rmsnorm in FP8");
}

void fp8_rmsnorm_recompute(const Tensor& x, const Tensor& rstd, const Tensor& w,
                           Fp8Tokens& rounded) {
  require_whole(x);
  check(fp8_rmsnorm_recompute(bf16_of(x), float_of(rstd), bf16_of(w), target(rounded), stream()),
        "rmsnorm in FP8");
}

void fp8_swiglu_forward(const Tensor& gate_up, Fp8Tokens& rounded) {
  require_whole(gate_up);
  check(fp8_swiglu(bf16_of(gate_up), target(rounded), stream()), "swiglu in FP8");
}

void fp8_swiglu_backward(const Tensor& gate_up, const Tensor& dy, Fp8SwigluGradient& rounded) {
  require_whole(gate_up), require_whole(dy);
  check(fp8_swiglu_backward(bf16_of(gate_up), bf16_of(dy), target(rounded.product),
                            target(rounded.gate_up), stream()),
        "swiglu gradient in FP8");
}

void fp8_rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                       const Tensor& sin, const GradientTarget& d_bias, Fp8Tokens& rounded) {
  for (const Tensor* t : {&dq, &dk, &dv})
    require(t->contiguous(), "FP8 rope gradient on CUDA needs dense heads, got shape {}",
            to_string(t->shape()));
  auto* partial = d_bias.defined()
                      ? static_cast<float*>(scratch(
                            bias_partial_floats(rounded.tokens, rounded.width) * sizeof(float)))
                      : nullptr;
  check(fp8_rope_backward(float_of(dq), float_of(dk), float_of(dv), float_of(cos), float_of(sin),
                          static_cast<int>(dq.size(1)), static_cast<int>(dk.size(1)),
                          static_cast<int>(dq.size(2)), target(rounded), out_of(d_bias), partial,
                          stream()),
        "rope gradient in FP8");
}

void fp8_linear_forward(const Fp8Tokens& x, const Fp8Weight& w, const Tensor& bias, Tensor& y,
                        Workspace& workspace) {
  if (x.tokens == 0) return;
  product(x, w.bytes, w.scales, y, workspace);
  if (bias.defined())
    check(add_bias(bf16_of(y), y.strides()[0], bf16_of(bias), y.size(0), y.size(1), stream()),
          "bias");
}

void fp8_linear_input_gradient(const Fp8Tokens& dy, const Fp8Weight& w, Tensor& dx,
                               Workspace& workspace) {
  if (dy.tokens == 0) return;
  product(dy, w.transposed, w.transposed_scales, dx, workspace);
}

void fp8_linear_weight_gradient(const Fp8Tokens& x, const Fp8Tokens& dy,
                                const GradientTarget& target) {
  const Tensor& dw = target.tensor;
  require(dw.contiguous(), "FP8 weight gradient needs dense rows, got shape {}",
          to_string(dw.shape()));
  gemm(Fp8Gemm{.m = dy.width,
               .n = x.width,
               .k = x.columns.size(1),
               .a = bytes_of(dy.columns),
               .a_scales = float_of(dy.column_scales),
               .b = bytes_of(x.columns),
               .b_scales = float_of(x.column_scales),
               .c = dw.raw(),
               .c_is_float = dw.dtype() == DType::f32,
               .beta = target.accumulate ? 1.0f : 0.0f});
}

}  // namespace ballast::cuda
