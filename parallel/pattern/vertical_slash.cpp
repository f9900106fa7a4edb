#include "parallel/pattern/vertical_slash.hpp"

#include <algorithm>
#include <optional>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"

namespace ballast {

void VerticalSlashSource::add_stretches(int segment, std::vector<SlashWindow>& windows) const {
  const std::int64_t stretch = options_.stretch, begin = axes().first_query[segment],
                     end = axis_.first_position[segment] + axis_.count[segment];
  require(begin % stretch == 0,
          "causal selection: a chunk starts at token {}, inside a stretch of {}", begin, stretch);
  for (std::int64_t at = begin; at < end; at += stretch) {
    SlashWindow window{segment, at, std::min(end, at + stretch), 0, 0, at == 0};
    if (at > begin) {
      window.first_row = at - options_.last_q;
      window.end_row = at;
    }
    windows.push_back(window);
  }
  if (carry_ != nullptr && end % stretch == 0)  // for the next chunk of the sample
    windows.push_back({segment, end, end, end - options_.last_q, end, false});
}

SlashSetup VerticalSlashSource::setup() const {
  // Where a share is 1 everything is chosen: nothing need be observed.
  const bool full =
      policy_ == nullptr && (options_.vertical_share >= 1 || options_.slash_share >= 1);
  SlashSetup setup{&axes(), &axis_, options_, {}, policy_ != nullptr};
  for (int s = 0; s < axis_.segments(); ++s) {
    const std::int64_t begin = axes().first_query[s],
                       end = axis_.first_position[s] + axis_.count[s];
    const bool whole = full || axis_.count[s] <= options_.whole_tokens();
    if (options_.causal() && !full && axis_.count[s] > 0)
      add_stretches(s, setup.windows);
    else
      setup.windows.push_back(
          {s, begin, std::max(begin, end), std::max(begin, end - options_.last_q), end, whole});
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
  const int heads = static_cast<int>(in.q.size(1));
  const SlashSetup windows = setup();
  if (!scores_) scores_ = slash_scores(windows, in.q);
  if (scores_->observes()) observe(in);
  std::optional<std::int64_t> budget;
  if (policy_ != nullptr) {
    Scope tuning(recorder_, EventKind::tuning);
    budget = choose(in.layer, scores_->coverage(heads, candidates()), heads);
  }
  Built built;
  SlashCounts counts;
  if (carry_ != nullptr && options_.causal()) {
    const auto before = carry_->find({in.layer, axes().first_query.front()});
    if (before != carry_->end()) counts.carried = before->second;
  }
  built.shards = scores_->build(heads, static_cast<int>(in.k.size(1)), budget, counts);
  if (!counts.carried.empty())
    (*carry_)[{in.layer, windows.windows.back().end}] = std::move(counts.carried);
  double queries = 0;
  for (const SlashWindow& window : windows.windows)
    queries += static_cast<double>(window.queries());
  built.budgets.resize(static_cast<std::size_t>(heads));
  for (std::size_t h = 0, i = 0; h < built.budgets.size(); ++h)
    for (const SlashWindow& window : windows.windows) {
      built.budgets[h].budget +=
          static_cast<double>(window.queries()) / std::max(1.0, queries) *
          (counts.slashes[i] + static_cast<double>(counts.columns[i]) / kBlock);
      built.budgets[h].overflow += counts.cut[i++];
    }
  return built;
}

}  // namespace ballast
