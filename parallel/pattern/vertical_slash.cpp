#include "parallel/pattern/vertical_slash.hpp"

#include <algorithm>
#include <optional>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"
#include "parallel/pattern/recall.hpp"

namespace ballast {

void VerticalSlashSource::sample_rows(std::vector<SlashWindow>& windows) const {
  for (SlashWindow& window : windows)
    if (!window.whole) window.rows.clear();
  const std::int64_t step = recorder_ != nullptr ? recorder_->context.step : 0;
  for (const SampledQuery& query :
       sample_queries(axes(), axis_, options_.last_q, 0, options_.recall_seed, step, kCoverageDraw,
                      options_.recall_names))
    if (SlashWindow& window = windows[query.segment]; !window.whole)
      append(window.rows, {query.segment, query.position, 1});
}

SlashSetup VerticalSlashSource::setup() const {
  SlashSetup setup{&axes(), &axis_, options_, {}, policy_ != nullptr};
  // Where a share is 1 everything is chosen: nothing need be observed.
  const bool full =
      policy_ == nullptr && (options_.vertical_share >= 1 || options_.slash_share >= 1);
  AttentionOptions options = options_;
  if (full) options.selection = IndexSelection::last;
  setup.windows = slash_windows(options, axis_, axes().first_query, carry_ != nullptr);
  if (policy_ != nullptr && options_.coverage_rows == CoverageRows::sampled)
    sample_rows(setup.windows);
  for (SlashWindow& window : setup.windows) window.whole = window.whole || full;
  return setup;
}

Tensor observe_rows(SlashScores& scores, const AttentionInputs& in, const RingJoin& ring) {
  const Tensor k = index_operand(in.k);
  Tensor q;
  do {
    q = scores.queries(in.q);
    ring.sum(q);
    Tensor maximum = scores.maximum(q, k, in.scale);
    ring.maximum(maximum);
    Tensor sum = scores.sum(q, k, in.scale, maximum);
    ring.sum(sum);
    scores.mass(q, k, in.scale, maximum, sum, ring);
  } while (scores.more());
  return q;
}

bool VerticalSlashSource::records() const {
  return recorder_ != nullptr && carry_ == nullptr && options_.indexes_every > 0 &&
         recorder_->context.step >= 0 && recorder_->context.step % options_.indexes_every == 0;
}

void VerticalSlashSource::record(int layer, int heads,
                                 const std::vector<SlashStretch>& chosen) const {
  for (int s = 0; s < axis_.segments(); ++s)
    for (int h = 0; h < heads && axis_.count[s] > 0; ++h) {
      IndexRow row;
      row.layer = layer;
      row.head = sp_.rank() * heads + h;
      row.tokens = axis_.count[s];
      for (const SlashStretch& stretch : chosen)
        if (stretch.segment == s)
          row.stretches.push_back(
              {stretch.first, stretch.local, stretch.heads[h].slashes, stretch.heads[h].columns});
      recorder_->index(std::move(row));
    }
}

PatternSource::Built VerticalSlashSource::build(const AttentionInputs& in) {
  const int heads = static_cast<int>(in.q.size(1));
  const SlashSetup windows = setup();
  if (!scores_) scores_ = slash_scores(windows, in.q);
  if (scores_->observes()) observe_rows(*scores_, in, *this);
  std::optional<std::int64_t> budget;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    budget = choose(in.layer, mean_coverage(scores_->coverage(heads, candidates()), heads));
  }
  Built built;
  SlashCounts counts;
  counts.keeps_chosen = records();
  if (carry_ != nullptr && options_.causal()) {
    const auto before = carry_->find({in.layer, axes().first_query.front()});
    if (before != carry_->end()) counts.carried = before->second;
  }
  built.shards = scores_->build(heads, static_cast<int>(in.k.size(1)), budget, counts);
  if (counts.keeps_chosen) record(in.layer, heads, counts.chosen);
  if (!counts.carried.empty())
    (*carry_)[{in.layer, windows.windows.back().end}] = std::move(counts.carried);
  double queries = 0;
  for (const SlashWindow& window : windows.windows)
    queries += static_cast<double>(window.queries());
  built.budgets.resize(static_cast<std::size_t>(heads));
  for (std::size_t h = 0, i = 0; h < built.budgets.size(); ++h)
    for (const SlashWindow& window : windows.windows) {
      HeadBudget& head = built.budgets[h];
      const double share = static_cast<double>(window.queries()) / std::max(1.0, queries);
      head.budget += share * (counts.slashes[i] + static_cast<double>(counts.columns[i]) / kBlock);
      head.overflow += counts.cut[i];
      head.overflow_mass += share * counts.cut_mass[i];
      ++i;
    }
  return built;
}

}  // namespace ballast
