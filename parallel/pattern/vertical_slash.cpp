#include "parallel/pattern/vertical_slash.hpp"

#include <algorithm>
#include <limits>
#include <optional>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"
#include "parallel/pattern/recall.hpp"

namespace ballast {

void VerticalSlashSource::add_stretches(int segment, std::vector<SlashWindow>& windows) const {
  const std::int64_t stretch = options_.stretch, begin = axes().first_query[segment],
                     end = axis_.first_position[segment] + axis_.count[segment];
  require(begin % stretch == 0,
          "causal selection: a chunk starts at token {}, inside a stretch of {}", begin, stretch);
  for (std::int64_t at = begin; at < end; at += stretch) {
    SlashWindow window{segment, at, std::min(end, at + stretch), {}, at == 0};
    if (at > begin) window.rows = {{segment, at - options_.last_q, options_.last_q}};
    windows.push_back(window);
  }
  if (carry_ != nullptr && end % stretch == 0)  // for the next chunk of the sample
    windows.push_back({segment, end, end, {{segment, end - options_.last_q, options_.last_q}}});
}

AxisRanges VerticalSlashSource::rows_of(int segment, std::int64_t begin, std::int64_t end) const {
  const std::int64_t first = std::max(begin, end - options_.last_q);
  if (policy_ == nullptr || options_.coverage_rows == CoverageRows::last)
    return first < end ? AxisRanges{{segment, first, end - first}} : AxisRanges{};
  AxisRanges rows;
  const std::int64_t step = recorder_ != nullptr ? recorder_->context.step : 0;
  for (const SampledQuery& query :
       sample_queries(axes(), axis_, options_.last_q, 0, options_.recall_seed, step, kCoverageDraw))
    if (query.segment == segment) append(rows, {segment, query.position, 1});
  return rows;
}

SlashSetup VerticalSlashSource::setup() const {
  // Where a share is 1 everything is chosen: nothing need be observed.
  const bool full =
      policy_ == nullptr && (options_.vertical_share >= 1 || options_.slash_share >= 1);
  SlashSetup setup{&axes(), &axis_, options_, {}, policy_ != nullptr};
  for (int s = 0; s < axis_.segments(); ++s) {
    const std::int64_t begin = axes().first_query[s],
                       end = axis_.first_position[s] + axis_.count[s];
    if (options_.causal() && !full && axis_.count[s] > 0) {
      add_stretches(s, setup.windows);
      continue;
    }
    SlashWindow window{s, begin, std::max(begin, end), {}, false};
    window.whole = full || axis_.count[s] <= options_.whole_tokens();
    if (!window.whole) window.rows = rows_of(s, begin, end);
    setup.windows.push_back(std::move(window));
  }
  return setup;
}

Tensor observe_rows(SlashScores& scores, const AttentionInputs& in, const RingJoin& ring) {
  const Tensor k = index_operand(in.k);
  Tensor q = scores.queries(in.q);
  ring.sum(q);
  Tensor maximum = scores.maximum(q, k, in.scale);
  ring.maximum(maximum);
  Tensor sum = scores.sum(q, k, in.scale, maximum);
  ring.sum(sum);
  scores.mass(q, k, in.scale, maximum, sum, ring);
  return q;
}

void VerticalSlashSource::record(int layer, int heads,
                                 const std::vector<SlashStretch>& chosen) const {
  if (recorder_ == nullptr || options_.indexes_every == 0 || recorder_->context.step < 0 ||
      recorder_->context.step % options_.indexes_every != 0)
    return;
  for (int s = 0; s < axis_.segments(); ++s)
    for (int h = 0; h < heads && axis_.count[s] > 0 && carry_ == nullptr; ++h) {
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
  if (carry_ != nullptr && options_.causal()) {
    const auto before = carry_->find({in.layer, axes().first_query.front()});
    if (before != carry_->end()) counts.carried = before->second;
  }
  built.shards = scores_->build(heads, static_cast<int>(in.k.size(1)), budget, counts);
  record(in.layer, heads, counts.chosen);
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
      head.overflow_mass +=
          share *
          (counts.cut_mass.empty() ? std::numeric_limits<double>::quiet_NaN() : counts.cut_mass[i]);
      ++i;
    }
  return built;
}

}  // namespace ballast
