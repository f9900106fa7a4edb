#include "parallel/pattern/pattern_source.hpp"

#include <algorithm>
#include <numeric>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "parallel/pattern/pattern_sources.hpp"

namespace ballast {

PatternSource::PatternSource(Communicator cp, Communicator sp, AttentionAxes axes_in,
                             const AttentionOptions& options, BudgetPolicy* policy,
                             Recorder* recorder)
    : IndexSource(std::move(axes_in)),
      cp_(std::move(cp)),
      sp_(std::move(sp)),
      options_(options),
      policy_(policy),
      recorder_(recorder),
      axis_(key_axis(axes())) {
  require(static_cast<int>(axes().keys.size()) == cp_.size() && axes().rank == cp_.rank(),
          "sparse attention: axes of rank {} of {} on rank {} of {}", axes().rank,
          axes().keys.size(), cp_.rank(), cp_.size());
  require(static_cast<int>(axes().first_query.size()) >= axis_.segments(),
          "sparse attention: first queries of {} segments, keys of {}", axes().first_query.size(),
          axis_.segments());
}

const std::vector<AttentionPattern>& PatternSource::shards(const AttentionInputs& in) {
  const auto found = layers_.find(in.layer);
  if (found != layers_.end()) return found->second;
  Scope scope(recorder_, EventKind::indexing);
  Built built = build(in);
  if (built.shards.empty()) built.shards = split_keys(built.index, axis_, axes().calls());
  record_budgets(recorder_, in.layer, built.shards, visible_pairs(axes().queries, axis_),
                 [&](int h) {
                   const HeadBudget& head = built.budgets.at(static_cast<std::size_t>(h));
                   return std::pair(head.budget, head.overflow);
                 });
  return layers_.emplace(in.layer, std::move(built.shards)).first->second;
}

std::vector<std::int64_t> PatternSource::query_counts() const {
  std::vector<std::int64_t> counts;
  for (int s = 0; s < axis_.segments(); ++s)
    counts.push_back(
        axis_.count[s] > 0 ? axis_.first_position[s] + axis_.count[s] - axes().first_query[s] : 0);
  return counts;
}

std::vector<double> PatternSource::query_shares() const {
  const std::vector<std::int64_t> counts = query_counts();
  const double queries = static_cast<double>(
      std::max<std::int64_t>(1, std::accumulate(counts.begin(), counts.end(), std::int64_t{0})));
  std::vector<double> share;
  for (std::int64_t n : counts) share.push_back(static_cast<double>(n) / queries);
  return share;
}

std::int64_t PatternSource::choose(int layer, Tensor coverage, std::int64_t heads) const {
  join(sp_, coverage, Reduction::sum);
  heads *= sp_.size();
  const std::vector<std::int64_t> counts = query_counts();
  const std::int64_t queries =
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) * heads;
  const Tensor sums = coverage.to(host_device());
  std::vector<double> mean;
  for (std::int64_t i = 0; i < sums.numel(); ++i)
    mean.push_back(queries > 0 ? static_cast<double>(sums.data<std::int64_t>()[i]) /
                                     (kCoverageUnit * static_cast<double>(queries))
                               : 1.0);
  return policy_->choose(layer, mean);
}

void PatternSource::join(const Communicator& ranks, Tensor& tensor, Reduction reduction) const {
  if (ranks.size() == 1 || tensor.numel() == 0) return;
  Scope wait(recorder_, EventKind::ring_wait);
  wait.bytes = static_cast<std::int64_t>(tensor.bytes());
  ranks.all_reduce(tensor, reduction);
}

std::unique_ptr<IndexSource> pattern_source(const Communicator& cp, AttentionAxes axes,
                                            const AttentionOptions& options, BudgetPolicy* policy,
                                            Recorder* recorder, const Communicator& sp) {
  if (options.pattern == PatternKind::vertical_slash)
    return std::make_unique<VerticalSlashSource>(cp, sp, std::move(axes), options, policy,
                                                 recorder);
  if (options.pattern == PatternKind::moba)
    return std::make_unique<MobaSource>(cp, sp, std::move(axes), options, policy, recorder);
  if (options.pattern == PatternKind::xattention)
    return std::make_unique<XAttentionSource>(cp, sp, std::move(axes), options, policy, recorder);
  fail("attention.pattern = \"{}\" has no index builder; allowed: vertical_slash, moba, xattention",
       name(options.pattern));
}

}  // namespace ballast
