// Matrix products whose operands are rounded to FP8: E4M3 (three mantissa bits, largest value 448),
// scaled by powers of two that are made from the operands themselves (no history), summed in fp32.
//   scale of a block = its largest magnitude / 448, rounded up to a power of two; 1 where all is 0
//   activations and gradients of outputs: blocks of 1 x 128 along a row where a product sums over
//   the width, and of 128 tokens of a column where it sums over tokens; weights: 128 x 128
// Rounding is to nearest, ties to even; a block with a value that is not finite becomes NaN, so
// that it reaches the loss. A GPU multiplies the bytes themselves; the host multiplies the rounded
// values in fp32, so that a deck behaves alike on both.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"
#include "core/model/fp8_specs.hpp"
#include "kernels/ops/gradient_target.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

/// A weight [out, in].  GPU: E4M3 bytes (u8) as stored and transposed, with their scales.  Host:
/// `bytes` has the rounded values [out, in] (f32), the others are undefined.
struct Fp8Weight {
  Tensor bytes, scales;                  ///< [out, in], f32 [out / 128][in / 128, padded to 4]
  Tensor transposed, transposed_scales;  ///< [in, out], likewise
  std::int64_t out = 0, in = 0;
};
/// Memory for a weight; out and in must be multiples of 16 (an Error names them).
Fp8Weight fp8_weight_memory(std::int64_t out, std::int64_t in, DType type, Device& device);
void fp8_round_weight(const Tensor& weight, Fp8Weight& rounded);

/// Activations or gradients [T, width].  GPU: E4M3 bytes (u8) with scales; T padded with zeros to a
/// multiple of 4 in rows, of 128 in columns.  Host: rounded values [T, width] (f32), no scales.
struct Fp8Tokens {
  Tensor rows, row_scales;        ///< [T, width], f32 [width / 128][T]; for sums over the width
  Tensor columns, column_scales;  ///< [width, T], f32 [T / 128][width]; for sums over tokens
  std::int64_t tokens = 0, width = 0;
};
enum class Fp8Sides { rows, columns, both };
/// x rounded for products that sum over the named sides, in workspace memory that is called after
/// `name` and is valid until the next call with that name.
Fp8Tokens fp8_round(const Tensor& x, Fp8Sides sides, const char* name, Workspace& workspace);

/// Memory for [tokens, width] rounded, of a GPU where `like` lies there; as fp8_round.
Fp8Tokens fp8_tokens_memory(std::int64_t tokens, std::int64_t width, const Tensor& like,
                            Fp8Sides sides, const char* name, Workspace& workspace);

/// y = x w^T (+ bias where defined), from x's rows; overwrites y [T, out] of the compute type.
void fp8_linear_forward(const Fp8Tokens& x, const Fp8Weight& w, const Tensor& bias, Tensor& y,
                        Workspace& workspace);
/// dx = dy w, from dy's rows; overwrites dx [T, in].
void fp8_linear_input_gradient(const Fp8Tokens& dy, const Fp8Weight& w, Tensor& dx,
                               Workspace& workspace);
/// dw = or += dy^T x, from the columns of both; fp32.
void fp8_linear_weight_gradient(const Fp8Tokens& x, const Fp8Tokens& dy, const GradientTarget& dw);

namespace host {
/// The nearest E4M3 value, as fp32; |x| at most 448, NaN stays NaN.
float nearest_e4m3(float x);
/// 2^e: the least power of two, at least 2^-126, that is not below amax / 448; 1 for 0 and for
/// what is not finite.
float fp8_scale(float amax);
}  // namespace host

}  // namespace ballast
