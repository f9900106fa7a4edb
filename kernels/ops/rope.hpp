// Rotary position embedding (Su et al. 2021, RoFormer, Equation 34) in the half-split order of
// Hugging Face: element i of a head turns with element i + D/2 by the angle position *
// frequency[i].  Frequencies may be scaled for long contexts: YaRN (Peng et al. 2023, Sections 3.2
// to 3.4) and Llama 3.1's "llama3" rule.
#pragma once
#include <vector>

#include "core/base/tensor.hpp"
#include "core/model/model_shape.hpp"

namespace ballast {

/// Angle per token [D/2], in radians, and the factor on cos and sin (YaRN's attention temperature,
/// else 1).
struct RopeFrequencies {
  std::vector<double> frequency;
  double amplitude = 1.0;
};
/// YaRN: frequencies that turn more than 32 times over original_context stay, those below one turn
/// are divided by yarn_factor, a linear ramp lies between; amplitude 0.1 ln(yarn_factor) + 1.
/// llama3: wavelengths below original_context / llama3_high stay, above original_context /
/// llama3_low are divided by llama3_factor.
RopeFrequencies rope_frequencies(const ModelShape& shape);

/// Overwrites cos and sin [T, D/2] (f32, or f64) with amplitude * cos and sin of position *
/// frequency; positions [T] i32. Angles are computed in fp64: in fp32 a position of 512K would lose
/// five digits.
void rope_table(const Tensor& positions, const RopeFrequencies& frequencies, Tensor& cos,
                Tensor& sin);

/// x [T, heads, D] in place, rows may lie apart: `bias` [heads D] is added where it is defined,
/// then the first `turned` heads rotate by every token's angles.
void rope_apply(Tensor& x, std::int64_t turned, const Tensor& bias, const Tensor& cos,
                const Tensor& sin);
/// Gradients of q, k and v before rotation, side by side, in one pass: d_qkv [T, (Hq + 2 Hkv) D] =
/// dq [T, Hq, D] and dk [T, Hkv, D] turned back (the rotation's transpose), and dv as it is.  On
/// CUDA dq, dk and dv are sums in f32, dense, and d_qkv is bf16.
void rope_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                   const Tensor& sin, Tensor& d_qkv);

}  // namespace ballast
