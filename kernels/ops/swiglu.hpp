// SwiGLU (Shazeer 2020, Equation 6): y = silu(gate) * up, silu(g) = g / (1 + e^-g).
// gate_up [T, 2 I] holds gate in columns [0, I) and up in [I, 2 I), as one joined matrix product
// leaves them; y [T, I].
#pragma once
#include "core/base/tensor.hpp"

namespace ballast {

void swiglu_forward(const Tensor& gate_up, Tensor& y);
/// Overwrites d_gate_up [T, 2 I]; it may be gate_up itself.  `y`, where it is defined: overwritten
/// with what forward gave, bit for bit, in the same pass.
void swiglu_backward(const Tensor& gate_up, const Tensor& dy, Tensor& d_gate_up,
                     const Tensor& y = {});

}  // namespace ballast
