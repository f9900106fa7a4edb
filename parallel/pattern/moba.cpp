#include "parallel/pattern/moba.hpp"

#include <algorithm>

#include "core/plan/attention/block_budget.hpp"
#include "core/plan/attention/coverage.hpp"
#include "kernels/attention/index_scores.hpp"

namespace ballast {
namespace {

/// Of every 64 queries of a segment, counted from its start, the first so many tell the coverage.
int told_of_64(CoverageRows rows) { return rows == CoverageRows::sampled ? 16 : kBlock; }

}  // namespace

bool MobaSource::takes_all(std::int64_t budget) const {
  return std::all_of(axis_.count.begin(), axis_.count.end(), [&](std::int64_t keys) {
    return budget_takes_all(budget, options_.moba_block, keys);
  });
}

Tensor MobaSource::means(const AttentionInputs& in) {
  if (!scores_) scores_ = block_scores(axes(), axis_, options_.moba_block, in.q);
  Tensor sums = scores_->pool(index_operand(in.k));
  join(sums, Reduction::sum);
  return scores_->means(sums);
}

PatternSource::Built MobaSource::build(const AttentionInputs& in) {
  const std::int64_t heads = in.q.size(1);
  const bool scored = !takes_all(policy_ != nullptr ? candidates().front() : options_.moba_top_k);
  const Tensor q = scored ? index_operand(in.q) : in.q, pooled = scored ? means(in) : Tensor();
  std::int64_t budget = options_.moba_top_k;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    std::vector<double> coverage(candidates().size(), 1.0);  // of all candidates that take all
    if (scored) {
      const int told = told_of_64(options_.coverage_rows);
      Tensor sums = scores_->coverage(q, pooled, in.scale, candidates(), told);
      join(sums, Reduction::sum);
      coverage = mean_coverage(sums, heads, told);
    }
    budget = choose(in.layer, coverage);
  }
  Built built;
  built.shards =
      takes_all(budget)
          ? dense(in)
          : scores_->build(scores_->route(q, pooled, in.scale, budget), static_cast<int>(heads),
                           static_cast<int>(in.k.size(1)), {budget, q.size(2)});
  built.budgets.assign(static_cast<std::size_t>(heads), {static_cast<double>(budget), 0});
  return built;
}

std::vector<AttentionWork> MobaSource::dense(const AttentionInputs& in) {
  if (!dense_) dense_.emplace(dense_patterns(axes().queries, axes().calls()));
  return dense_->at(in.q, in.k);
}

}  // namespace ballast
