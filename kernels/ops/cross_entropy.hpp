// Softmax cross-entropy of token predictions: loss = lse - logit[target], lse = ln sum exp(logits).
// logits [n, vocabulary]; targets [n] i32, -1 where the token carries no loss; token_loss, lse,
// weights [n] in f32 (f64 for f64).
#pragma once
#include "core/base/tensor.hpp"

namespace ballast {

/// Overwrites token_loss and lse; both are 0 where there is no loss.  A target beyond the
/// vocabulary throws Error on the host.
void cross_entropy_forward(const Tensor& logits, const Tensor& targets, Tensor& token_loss,
                           Tensor& lse);
/// correct [n] u8 = 1 where the target is the most likely token: no logit is higher, and of equal
/// ones the lowest id counts; 0 elsewhere, where there is no loss, and where a logit is NaN.
void cross_entropy_correct(const Tensor& logits, const Tensor& targets, Tensor& correct);
/// cross_entropy_forward, and turns logits into the gradient of sum scale * weight * token_loss in
/// place: scale weight (softmax - onehot).  Undefined `weights` are ones.
void cross_entropy_with_gradient(const Tensor& targets, double scale, const Tensor& weights,
                                 Tensor& logits, Tensor& token_loss, Tensor& lse);
/// Sum of token losses, times `weights` where they are defined, in fp64.  Waits for the device.
double sum_losses(const Tensor& token_loss, const Tensor& weights = {});

}  // namespace ballast
