// Token embedding: y[t] = w[token[t]].  tokens [T] i32, w [vocabulary, H], y [T, H].
#pragma once
#include "core/base/tensor.hpp"
#include "kernels/ops/gradient_target.hpp"

namespace ballast {

/// Overwrites y.  On the host a token outside [0, vocabulary) throws Error naming its place.
void embedding_forward(const Tensor& tokens, const Tensor& w, Tensor& y);
/// dw[token] += sum of dy over the tokens of that id, summed in fp64 in token order before it is
/// added; as the first of a step dw is zeroed before.
void embedding_weight_gradient(const Tensor& tokens, const Tensor& dy, const GradientTarget& dw);

}  // namespace ballast
