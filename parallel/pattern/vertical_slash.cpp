#include "parallel/pattern/vertical_slash.hpp"

#include <algorithm>
#include <optional>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"

namespace ballast {

SlashSetup VerticalSlashSource::setup() const {
  // Where a share is 1 everything is chosen: nothing need be observed.
  const bool full =
      policy_ == nullptr && (options_.vertical_share >= 1 || options_.slash_share >= 1);
  SlashSetup setup{&axes(), &axis_, options_, {}, {}, policy_ != nullptr};
  for (int s = 0; s < axis_.segments(); ++s) {
    setup.whole.push_back(full || axis_.count[s] <= options_.last_q);
    setup.first_observed.push_back(std::max(
        axes().first_query[s], axis_.first_position[s] + axis_.count[s] - options_.last_q));
  }
  return setup;
}

void VerticalSlashSource::observe(const AttentionInputs& in) {
  const Tensor k = index_operand(in.k);
  Tensor q = scores_->queries(in.q);
  join(q, Reduction::sum);
  Tensor maximum = scores_->maximum(q, k, in.scale);
  join(maximum, Reduction::max);
  Tensor sum = scores_->sum(q, k, in.scale, maximum);
  join(sum, Reduction::sum);
  scores_->mass(q, k, in.scale, maximum, sum, *this);
}

PatternSource::Built VerticalSlashSource::build(const AttentionInputs& in) {
  const int heads = static_cast<int>(in.q.size(1)), segments = axis_.segments();
  if (!scores_) scores_ = slash_scores(setup(), in.q);
  if (scores_->observes()) observe(in);
  std::optional<std::int64_t> budget;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    budget = choose(in.layer, scores_->coverage(heads, candidates(), query_counts()), heads);
  }
  Built built;
  SlashCounts counts;
  built.shards = scores_->build(heads, static_cast<int>(in.k.size(1)), budget, counts);
  const std::vector<double> weight = query_shares();
  built.budgets.resize(static_cast<std::size_t>(heads));
  for (int h = 0; h < heads; ++h)
    for (int s = 0; s < segments; ++s) {
      const std::size_t i = static_cast<std::size_t>(h) * segments + s;
      built.budgets[h].budget +=
          weight[s] * (counts.slashes[i] + static_cast<double>(counts.columns[i]) / kBlock);
      built.budgets[h].overflow += counts.cut[i];
    }
  return built;
}

}  // namespace ballast
