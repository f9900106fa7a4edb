// Final norm, language-model head and cross-entropy, in chunks of tokens: the logits of a long
// sequence are never whole. Forward keeps one LSE per token; backward recomputes each chunk's
// logits.  Composed of rmsnorm, linear and cross_entropy, so it has no backend code of its own.
#pragma once
#include "core/base/tensor.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

/// H: hidden size, V: vocabulary.  Gradients are undefined for evaluation.
struct LmHead {
  Tensor norm, norm_gradient;      ///< [H]
  Tensor weight, weight_gradient;  ///< [V, H]; the embedding when tied
  double eps = 1e-6;
  std::int64_t chunk_tokens = 1024;
};

/// hidden = residual + branch (all [T, H]); then rstd, lse and token_loss [T] of the normed hidden
/// under targets [T], and, where `correct` [T] is defined, whether each target is the most likely
/// token (cross_entropy_correct).
void lm_head_forward(const LmHead& head, const Tensor& residual, const Tensor& branch,
                     const Tensor& targets, Workspace& workspace, Tensor& hidden, Tensor& rstd,
                     Tensor& lse, Tensor& token_loss, const Tensor& correct = {});
/// Gradient of sum scale * weight * token_loss: overwrites d_hidden [T, H], adds the parameter
/// gradients.
void lm_head_backward(const LmHead& head, const Tensor& hidden, const Tensor& rstd,
                      const Tensor& lse, const Tensor& targets, double scale, const Tensor& weights,
                      Workspace& workspace, Tensor& d_hidden);

}  // namespace ballast
