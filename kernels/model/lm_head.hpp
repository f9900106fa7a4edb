// Final norm, language-model head and cross-entropy, in chunks of tokens: the logits of a long
// sequence are never whole, and each chunk's are formed once, for the loss and its gradient.
// Composed of rmsnorm, linear and cross_entropy, so it has no backend code of its own.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/tensor.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/ops/workspace.hpp"

namespace ballast {

/// H: hidden size, V: vocabulary.
struct LmHead {
  Tensor norm;    ///< [H]
  Tensor weight;  ///< [V, H]; the embedding when tied
  ParameterGradient norm_gradient, weight_gradient;
  double eps = 1e-6;
  std::int64_t chunk_tokens = 1024;
};

/// What training asks for: the gradient of sum scale * weight * token_loss.
struct LossGradient {
  double scale = 1;
  Tensor weights;   ///< [T]; undefined: ones
  Tensor d_hidden;  ///< [T, H], overwritten: gradient of the hidden state
};

/// token_loss [T] of the hidden state residual + branch (both [T, H]) under targets [T] and, where
/// `correct` [T] is defined, whether each target is the most likely token (cross_entropy_correct).
/// With `gradient` also that, and the parameter gradients are added.
void lm_head(const LmHead& head, const Tensor& residual, const Tensor& branch,
             const Tensor& targets, Workspace& workspace, Tensor& token_loss,
             const Tensor& correct = {}, const LossGradient* gradient = nullptr);

/// Logits [rows, V] of some rows of the hidden state, for generation.
Tensor lm_logits(const LmHead& head, const Tensor& residual, const Tensor& branch,
                 const std::vector<std::int64_t>& rows, Workspace& workspace);

}  // namespace ballast
