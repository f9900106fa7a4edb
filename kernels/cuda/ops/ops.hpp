// CUDA launchers of every model operation but attention: plain device pointers, row-major, one
// stream.  Values are bf16, statistics and gradients of parameters fp32.  Nothing here allocates,
// synchronises or throws; each call returns the launch's cudaError_t. The host twins and the
// formulas are in kernels/<operation>.hpp.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

struct __nv_bfloat16;

namespace ballast::cuda {

using Bf16 = __nv_bfloat16;

/// Where the gradient of a parameter goes, in fp32 or, rounded to nearest, in bf16: it is
/// stored there or, with `accumulate`, added to what is there.  `at` null: a frozen parameter.
struct GradientOut {
  void* at = nullptr;
  bool is_float = true, accumulate = false;
};

/// Where [rows, width] go that are rounded to E4M3 (kernels/ops/fp8.hpp); width a multiple of 8.
/// `bytes` [rows_padded, width] with `scales` [width / 128][rows_padded], rows beyond `rows` zero;
/// `transposed` [width, columns_padded] (a multiple of 128) with `transposed_scales`
/// [columns_padded / 128][width]; null pairs are left out.
struct Fp8Target {
  std::int64_t rows, width;
  std::uint8_t* bytes;
  float* scales;
  std::int64_t rows_padded;
  std::uint8_t* transposed;
  float* transposed_scales;
  std::int64_t columns_padded;
};
/// Rows of bf16, `stride` elements apart.
cudaError_t fp8_round(const Bf16* x, std::int64_t stride, const Fp8Target& to, cudaStream_t stream);
/// Operations whose results are rounded in place of being written, with the bits of separate
/// passes. swiglu_forward by rows:
cudaError_t fp8_swiglu(const Bf16* gate_up, const Fp8Target& to, cudaStream_t stream);
/// swiglu_backward; and the product again: `to_product` by columns, `to_gradient` [rows, 2 width]
/// by both; width a multiple of 128.
cudaError_t fp8_swiglu_backward(const Bf16* gate_up, const Bf16* d_y, const Fp8Target& to_product,
                                const Fp8Target& to_gradient, cudaStream_t stream);
/// rmsnorm_forward by rows, its sum and rstd as there; rmsnorm_recompute by columns.
cudaError_t fp8_rmsnorm(const Bf16* x, const Bf16* residual, const Bf16* weight, double eps,
                        Bf16* sum, float* rstd, const Fp8Target& to, cudaStream_t stream);
cudaError_t fp8_rmsnorm_recompute(const Bf16* x, const float* rstd, const Bf16* weight,
                                  const Fp8Target& to, cudaStream_t stream);
/// rope_backward by both, for heads that divide a block of 128; in the same pass d_bias as
/// bias_gradient, with its workspace.
cudaError_t fp8_rope_backward(const float* dq, const float* dk, const float* dv, const float* cos,
                              const float* sin, int q_heads, int kv_heads, int head_dim,
                              const Fp8Target& to, const GradientOut& d_bias, float* partial,
                              cudaStream_t stream);
/// A weight [out, in] in blocks of 128 x 128: bytes [out, in] with scales [out / 128][in / 128,
/// padded to 4], and both transposed.
cudaError_t fp8_round_weight(const Bf16* weight, std::int64_t stride, std::int64_t out,
                             std::int64_t in, std::uint8_t* bytes, float* scales,
                             std::uint8_t* transposed, float* transposed_scales,
                             cudaStream_t stream);
/// y [rows, width] += bias [width]; rows `stride` elements apart.
cudaError_t add_bias(Bf16* y, std::int64_t stride, const Bf16* bias, std::int64_t rows,
                     std::int64_t width, cudaStream_t stream);

/// y = rmsnorm(x + residual) * weight over rows of `width` (a multiple of 8, at most 16384).
/// `residual` may be null; otherwise the sum is written to `sum` [rows, width] (bf16).  rstd
/// [rows].
cudaError_t rmsnorm_forward(const Bf16* x, const Bf16* residual, const Bf16* weight, double eps,
                            Bf16* sum, Bf16* y, float* rstd, std::int64_t rows, int width,
                            cudaStream_t stream);
/// y again from the kept rstd, bit for bit.
cudaError_t rmsnorm_recompute(const Bf16* x, const float* rstd, const Bf16* weight, Bf16* y,
                              std::int64_t rows, int width, cudaStream_t stream);
/// d_x = gradient of the norm's input, added to d_x when `accumulate_x`; in the same pass d_weight
/// [width].  `partial` is workspace of rmsnorm_partial_floats(width) floats; sums run in a fixed
/// order.
std::size_t rmsnorm_partial_floats(int width);
cudaError_t rmsnorm_backward(const Bf16* x, const Bf16* weight, const float* rstd, const Bf16* d_y,
                             bool accumulate_x, Bf16* d_x, const GradientOut& d_weight,
                             float* partial, std::int64_t rows, int width, cudaStream_t stream);

/// cos, sin [tokens, half] of positions[t] * frequency[i], times `scale`; angles in fp64. frequency
/// [half] on the device.
cudaError_t rope_table(const std::int32_t* positions, const double* frequency, double scale,
                       float* cos, float* sin, std::int64_t tokens, int half, cudaStream_t stream);
/// x [tokens, heads, head_dim] in place (`stride`: between tokens, in elements, a multiple of 4):
/// bias [heads, head_dim] is added (null: none), then the first `turned` heads are rotated.
cudaError_t rope_apply(Bf16* x, std::int64_t stride, const Bf16* bias, const float* cos,
                       const float* sin, std::int64_t tokens, int heads, int turned, int head_dim,
                       cudaStream_t stream);
/// Rows of d_qkv [tokens, (q_heads + 2 kv_heads) head_dim] (`stride` apart) = dq and dk turned
/// back, and dv; those are dense, [tokens, heads, head_dim].
cudaError_t rope_backward(const float* dq, const float* dk, const float* dv, const float* cos,
                          const float* sin, Bf16* d_qkv, std::int64_t stride, std::int64_t tokens,
                          int q_heads, int kv_heads, int head_dim, cudaStream_t stream);

/// y [tokens, q_heads + kv_heads, head_dim], dense: rows of x (`stride` elements apart), every head
/// over its root mean square, times w_q or w_k [head_dim], then turned.  head_dim is a multiple of
/// 16, at most 256.
cudaError_t qk_norm_rope(const Bf16* x, std::int64_t stride, const Bf16* w_q, const Bf16* w_k,
                         double eps, const float* cos, const float* sin, Bf16* y,
                         std::int64_t tokens, int q_heads, int kv_heads, int head_dim,
                         cudaStream_t stream);
/// Its backward behind rope_backward's, in one pass; d_w_q and d_w_k as rmsnorm_backward's d_weight
/// (both or none).  `partial` is workspace of qk_norm_partial_floats(head_dim) floats.
struct QkNormBackward {
  const float *dq, *dk, *dv;
  const Bf16* x;
  std::int64_t stride;
  const Bf16 *w_q, *w_k;
  double eps;
  const float *cos, *sin;
  Bf16* d_qkv;
  std::int64_t d_stride;
  GradientOut d_w_q, d_w_k;
  float* partial;
  std::int64_t tokens;
  int q_heads, kv_heads, head_dim;
};
std::size_t qk_norm_partial_floats(int head_dim);
cudaError_t qk_norm_rope_backward(const QkNormBackward& arguments, cudaStream_t stream);

/// y [rows, width] = silu(gate) * up with gate_up [rows, 2 width]; and its backward into d_gate_up,
/// with y again unless it is null.
cudaError_t swiglu_forward(const Bf16* gate_up, Bf16* y, std::int64_t rows, std::int64_t width,
                           cudaStream_t stream);
cudaError_t swiglu_backward(const Bf16* gate_up, const Bf16* d_y, Bf16* d_gate_up, Bf16* y,
                            std::int64_t rows, std::int64_t width, cudaStream_t stream);

/// y [tokens, width] = table[ids].
cudaError_t embedding_forward(const std::int32_t* ids, const Bf16* table, Bf16* y,
                              std::int64_t tokens, std::int64_t width, cudaStream_t stream);
/// d_table[ids[t]] += d_y[t] (it accumulates), in ascending t for each id (deterministic: ids are
/// sorted first). Workspace of embedding_workspace(tokens) bytes.
std::size_t embedding_workspace(std::int64_t tokens);
cudaError_t embedding_backward(const std::int32_t* ids, const Bf16* d_y, const GradientOut& d_table,
                               std::int64_t tokens, std::int64_t width, void* workspace,
                               std::size_t workspace_bytes, cudaStream_t stream);

/// logits [rows, vocabulary] -> loss [rows] (0 where target < 0) and lse [rows].
cudaError_t cross_entropy_forward(const Bf16* logits, const std::int32_t* targets, float* loss,
                                  float* lse, std::int64_t rows, std::int64_t vocabulary,
                                  cudaStream_t stream);
/// correct [rows] u8 = 1 where no column's logit is above the target's, nor equal at a lower
/// column; 0 where target < 0 or a logit is NaN.
cudaError_t cross_entropy_correct(const Bf16* logits, const std::int32_t* targets,
                                  std::uint8_t* correct, std::int64_t rows, std::int64_t vocabulary,
                                  cudaStream_t stream);
/// Both at once: loss and lse as cross_entropy_forward, and logits are overwritten with their
/// gradient, (softmax - onehot) * scale * weights[row] (null: ones), 0 where target < 0.
cudaError_t cross_entropy_with_gradient(Bf16* logits, const std::int32_t* targets, float* loss,
                                        float* lse, float scale, const float* weights,
                                        std::int64_t rows, std::int64_t vocabulary,
                                        cudaStream_t stream);

/// Factors of one AdamW step: of the gradient, of moments and what joins them (rest: 1 - beta), of
/// the first moment (step_size: learning rate over its bias correction), of the root of the second
/// (correction: 1 / sqrt(1 - beta2^step)), of decaying weights (shrink: learning rate x decay).
struct AdamWFactors {
  float scale, beta1, beta2, rest1, rest2, step_size, correction, eps, shrink;
  std::int64_t first = 0;  ///< number of the first element, by which bf16 moments are rounded
  std::uint32_t key = 0;   ///< rounding_key() of the step
};
/// AdamW on n elements: fp32 master, gradient in fp32 or bf16, moments in fp32 or in bf16, rounded
/// by chance (kernels/ops/stochastic_rounding.hpp); bf16 values get the rounded master.
/// Weights decay in the ranges [decay_bounds[0], decay_bounds[1]), ... (`bounds` ascending elements
/// on the device).  `beside`: on a third of the multiprocessors, with the same bits.
template <class Moment, class Gradient>
cudaError_t adamw_step(float* master, Moment* moment1, Moment* moment2,
                       const std::int64_t* decay_bounds, int bounds, const Gradient* gradient,
                       Bf16* values, std::int64_t n, AdamWFactors factors, cudaStream_t stream,
                       bool beside = false);
/// Muon's momentum on n elements, fp32: moment = momentum moment + scale gradient, and the gradient
/// becomes own scale gradient + ahead moment.
cudaError_t muon_momentum(float* moment, float* gradient, std::int64_t n, float scale,
                          float momentum, float own, float ahead, cudaStream_t stream);
/// y = bf16(x / (sqrt(squares[0]) + eps)), n elements.
cudaError_t normalise(const float* x, const double* squares, double eps, Bf16* y, std::int64_t n,
                      cudaStream_t stream);
/// master = (1 - shrink) master - step_size direction, n elements; bf16 values get the rounded
/// master.
cudaError_t muon_update(float* master, const float* direction, Bf16* values, std::int64_t n,
                        float step_size, float shrink, cudaStream_t stream);
/// result[0] = sum of squares of x, fp32 or bf16, in fp64, fixed order.  `partial`:
/// sum_partial_doubles() doubles.
std::size_t sum_partial_doubles();
template <class T>
cudaError_t sum_of_squares(const T* x, std::int64_t n, double* partial, double* result,
                           cudaStream_t stream);
/// result[0] = sum of x in fp64, fixed order.
cudaError_t sum(const float* x, std::int64_t n, double* partial, double* result,
                cudaStream_t stream);

/// y = or += scale x where (stream, keys[row], column) lets the element stay, else 0
/// (kernels/ops/dropout.hpp); null keys: all stay.  Strides in elements; y may be x.
cudaError_t dropout(const Bf16* x, std::int64_t x_stride, const std::int64_t* keys,
                    std::uint64_t stream_id, std::uint32_t threshold, float scale, Bf16* y,
                    std::int64_t y_stride, bool accumulate, std::int64_t rows, std::int64_t width,
                    cudaStream_t stream);

/// out[i] = std * random_normal(seed, stream_id, i), rounded as the host's fp32 to bf16.
cudaError_t fill_normal(Bf16* out, std::int64_t n, double std, std::uint64_t seed,
                        std::uint64_t stream_id, cudaStream_t stream);

/// out = a + b over rows of `width` elements whose starts lie `*_stride` elements apart, each fp32
/// or (without `*_float`) bf16: all bf16, or a fp32 and one of b and out at least.
cudaError_t add_rows(const void* a, bool a_float, std::int64_t a_stride, const void* b,
                     bool b_float, std::int64_t b_stride, void* out, bool out_float,
                     std::int64_t out_stride, std::int64_t rows, std::int64_t width,
                     cudaStream_t stream);
/// Same rows, between any two of bf16 and fp32 (flags tell which side is fp32).
cudaError_t convert_rows(const void* x, bool x_float, std::int64_t x_stride, void* y, bool y_float,
                         std::int64_t y_stride, std::int64_t rows, std::int64_t width,
                         cudaStream_t stream);
/// d_bias[c] = sum over rows of d_y[r, c], in a fixed order.
/// Rows of 16-byte pieces.  `partial`: bias_partial_floats(rows, columns) floats.
cudaError_t bias_gradient(const Bf16* d_y, std::int64_t row_stride, const GradientOut& d_bias,
                          float* partial, std::int64_t rows, std::int64_t columns,
                          cudaStream_t stream);
std::size_t bias_partial_floats(std::int64_t rows, std::int64_t columns);
/// out [columns] takes the sum of `parts` rows of partial, in a fixed order.
cudaError_t add_partials(const float* partial, const GradientOut& out, std::int64_t columns,
                         int parts, cudaStream_t stream);

}  // namespace ballast::cuda
