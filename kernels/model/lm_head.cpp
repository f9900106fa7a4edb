#include "kernels/model/lm_head.hpp"

#include <algorithm>

#include "core/model/tensor_specs.hpp"
#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"

namespace ballast {
namespace {

/// One chunk's tensors; row i of `hidden` is token i of the chunk.
struct HeadChunk {
  Tensor hidden, normed, rstd;
  Tensor logits, targets, token_loss, lse;
};

void chunk_gradient(const LmHead& head, const LossGradient& gradient, std::int64_t begin,
                    std::int64_t end, HeadChunk& c) {
  cross_entropy_with_gradient(
      c.targets, gradient.scale,
      gradient.weights.defined() ? gradient.weights.rows(begin, end) : Tensor(), c.logits,
      c.token_loss, c.lse);
  if (head.weight_gradient.defined())
    linear_weight_gradient(c.normed, c.logits, head.weight_gradient.next());
  Tensor& d_normed = c.normed;  // not needed any more
  linear_input_gradient(c.logits, head.weight, d_normed);
  Tensor d_hidden = gradient.d_hidden.rows(begin, end);
  rmsnorm_backward(d_normed, c.hidden, c.rstd, head.norm, false, d_hidden,
                   head.norm_gradient.next());
}

}  // namespace

void lm_head(const LmHead& head, const Tensor& residual, const Tensor& branch,
             const Tensor& targets, Workspace& workspace, Tensor& token_loss, const Tensor& correct,
             const LossGradient* gradient) {
  const std::int64_t tokens = residual.size(0), width = residual.size(1),
                     vocabulary = head.weight.size(0);
  const DType type = residual.dtype(), statistics = token_loss.dtype();
  require(head.chunk_tokens > 0, "the LM head needs chunks of at least one token, got {}",
          head.chunk_tokens);
  for (std::int64_t begin = 0; begin < tokens; begin += head.chunk_tokens) {
    const std::int64_t end = std::min(begin + head.chunk_tokens, tokens), n = end - begin;
    HeadChunk c{.hidden = workspace.take("head hidden", {n, width}, type),
                .normed = workspace.take("head normed", {n, width}, type),
                .rstd = workspace.take("head rstd", {n}, statistics),
                .logits = workspace.take("head logits", {n, vocabulary}, type),
                .targets = targets.rows(begin, end),
                .token_loss = token_loss.rows(begin, end),
                .lse = workspace.take("head lse", {n}, statistics)};
    add_rmsnorm_forward(residual.rows(begin, end), branch.rows(begin, end), head.norm, head.eps,
                        c.hidden, c.normed, c.rstd);
    linear_forward(c.normed, head.weight, {}, c.logits);
    if (correct.defined()) {
      Tensor chunk_correct = correct.rows(begin, end);
      cross_entropy_correct(c.logits, c.targets, chunk_correct);
    }
    if (gradient != nullptr)
      chunk_gradient(head, *gradient, begin, end, c);
    else
      cross_entropy_forward(c.logits, c.targets, c.token_loss, c.lse);
  }
}

Tensor lm_logits(const LmHead& head, const Tensor& residual, const Tensor& branch,
                 const std::vector<std::int64_t>& rows, Workspace& workspace) {
  const std::int64_t width = residual.size(1), vocabulary = head.weight.size(0),
                     count = static_cast<std::int64_t>(rows.size());
  const DType type = residual.dtype(), statistics = statistics_type(type);
  Tensor logits = Tensor::empty({count, vocabulary}, type, device_of(residual.space()),
                                MemoryCategory::workspace);
  Tensor hidden = workspace.take("head hidden", {1, width}, type),
         normed = workspace.take("head normed", {1, width}, type),
         rstd = workspace.take("head rstd", {1}, statistics);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = rows[static_cast<std::size_t>(i)];
    add_rmsnorm_forward(residual.rows(row, row + 1), branch.rows(row, row + 1), head.norm, head.eps,
                        hidden, normed, rstd);
    Tensor out = logits.rows(i, i + 1);
    linear_forward(normed, head.weight, {}, out);
  }
  return logits;
}

}  // namespace ballast
