#include "kernels/model/lm_head.hpp"

#include <algorithm>

#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"

namespace ballast {

void lm_head_forward(const LmHead& head, const Tensor& residual, const Tensor& branch,
                     const Tensor& targets, Workspace& workspace, Tensor& hidden, Tensor& rstd,
                     Tensor& lse, Tensor& token_loss, const Tensor& correct) {
  const std::int64_t tokens = residual.size(0), width = residual.size(1),
                     vocabulary = head.weight.size(0);
  require(head.chunk_tokens > 0, "the LM head needs chunks of at least one token, got {}",
          head.chunk_tokens);
  for (std::int64_t begin = 0; begin < tokens; begin += head.chunk_tokens) {
    const std::int64_t end = std::min(begin + head.chunk_tokens, tokens);
    Tensor normed = workspace.take("head normed", {end - begin, width}, residual.dtype());
    Tensor logits = workspace.take("head logits", {end - begin, vocabulary}, residual.dtype());
    Tensor h = hidden.rows(begin, end), r = rstd.rows(begin, end), l = lse.rows(begin, end),
           loss = token_loss.rows(begin, end);
    add_rmsnorm_forward(residual.rows(begin, end), branch.rows(begin, end), head.norm, head.eps, h,
                        normed, r);
    linear_forward(normed, head.weight, {}, logits);
    cross_entropy_forward(logits, targets.rows(begin, end), loss, l);
    if (correct.defined()) {
      Tensor c = correct.rows(begin, end);
      cross_entropy_correct(logits, targets.rows(begin, end), c);
    }
  }
}

void lm_head_backward(const LmHead& head, const Tensor& hidden, const Tensor& rstd,
                      const Tensor& lse, const Tensor& targets, double scale, const Tensor& weights,
                      Workspace& workspace, Tensor& d_hidden) {
  const std::int64_t tokens = hidden.size(0), width = hidden.size(1),
                     vocabulary = head.weight.size(0);
  Tensor norm_gradient = head.norm_gradient, weight_gradient = head.weight_gradient;
  for (std::int64_t begin = 0; begin < tokens; begin += head.chunk_tokens) {
    const std::int64_t end = std::min(begin + head.chunk_tokens, tokens);
    Tensor normed = workspace.take("head normed", {end - begin, width}, hidden.dtype());
    Tensor d_normed = workspace.take("head d_normed", {end - begin, width}, hidden.dtype());
    Tensor logits = workspace.take("head logits", {end - begin, vocabulary}, hidden.dtype());
    const Tensor h = hidden.rows(begin, end), r = rstd.rows(begin, end);
    Tensor d_h = d_hidden.rows(begin, end);
    rmsnorm_recompute(h, r, head.norm, normed);
    linear_forward(normed, head.weight, {}, logits);
    cross_entropy_backward(targets.rows(begin, end), lse.rows(begin, end), scale,
                           weights.defined() ? weights.rows(begin, end) : Tensor(), logits);
    linear_weight_gradient(normed, logits, weight_gradient);
    linear_input_gradient(logits, head.weight, d_normed);
    rmsnorm_weight_gradient(d_normed, h, r, norm_gradient);
    rmsnorm_input_gradient(d_normed, h, r, head.norm, false, d_h);
  }
}

}  // namespace ballast
