#include "parallel/pattern/moba.hpp"

#include "kernels/attention/index_scores.hpp"

namespace ballast {

PatternSource::Built MobaSource::build(const AttentionInputs& in) {
  const Tensor q = index_operand(in.q), k = index_operand(in.k);
  const std::int64_t heads = q.size(1);
  if (!scores_) scores_ = block_scores(axes(), axis_, options_.moba_block, q);
  Tensor sums = scores_->pool(k);
  join(sums, Reduction::sum);
  const Tensor means = scores_->means(sums);
  std::int64_t budget = options_.moba_top_k;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    Tensor coverage = scores_->coverage(q, means, in.scale, candidates());
    join(coverage, Reduction::sum);
    budget = choose(in.layer, coverage, heads);
  }
  Built built;
  built.shards = scores_->build(scores_->route(q, means, in.scale, budget), static_cast<int>(heads),
                                static_cast<int>(k.size(1)), {budget, q.size(2)});
  built.budgets.assign(static_cast<std::size_t>(heads), {static_cast<double>(budget), 0});
  return built;
}

}  // namespace ballast
