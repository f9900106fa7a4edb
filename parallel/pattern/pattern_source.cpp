#include "parallel/pattern/pattern_source.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/coverage.hpp"
#include "parallel/pattern/fixed_sources.hpp"
#include "parallel/pattern/heads.hpp"
#include "parallel/pattern/moba.hpp"
#include "parallel/pattern/recall.hpp"
#include "parallel/pattern/vertical_slash.hpp"
#include "parallel/pattern/xattention.hpp"

namespace ballast {

PatternSource::PatternSource(Communicator cp, Communicator sp, AttentionAxes axes_in,
                             const AttentionOptions& options, BudgetPolicy* policy,
                             Recorder* recorder, std::shared_ptr<SlashCarry> carry)
    : IndexSource(std::move(axes_in)),
      cp_(std::move(cp)),
      sp_(std::move(sp)),
      options_(options),
      policy_(policy),
      recorder_(recorder),
      axis_(key_axis(axes())),
      carry_(std::move(carry)) {
  require(static_cast<int>(axes().keys.size()) == cp_.size() && axes().rank == cp_.rank(),
          "sparse attention: axes of rank {} of {} on rank {} of {}", axes().rank,
          axes().keys.size(), cp_.rank(), cp_.size());
  require(static_cast<int>(axes().first_query.size()) >= axis_.segments(),
          "sparse attention: first queries of {} segments, keys of {}", axes().first_query.size(),
          axis_.segments());
}

const std::vector<AttentionWork>& PatternSource::shards(const AttentionInputs& in) {
  const auto found = layers_.find(in.layer);
  if (found != layers_.end()) return found->second;
  Scope scope(recorder_, EventKind::indexing);
  Built built = build(in);
  record_budgets(recorder_, in.layer, static_cast<int>(built.budgets.size()), built.shards,
                 visible_keys(axes().queries, axis_).pairs(), [&](int h) {
                   const HeadBudget& head = built.budgets.at(static_cast<std::size_t>(h));
                   return std::tuple(head.budget, head.overflow, head.overflow_mass,
                                     head.kind ? static_cast<int>(*head.kind) : -1);
                 });
  if (observes_recall(in.layer)) {
    const int heads = static_cast<int>(in.q.size(1));
    for (const RecallRow& row :
         measure_recall(axes(), axis_,
                        sample_queries(axes(), axis_, options_.recall_rows, options_.whole_tokens(),
                                       options_.recall_seed, recorder_->context.step, in.layer,
                                       options_.recall_names),
                        in, built.shards, sp_.rank() * heads, *this))
      recorder_->recall(row);
  }
  return layers_.emplace(in.layer, std::move(built.shards)).first->second;
}

bool PatternSource::observes_recall(int layer) const {
  return recorder_ != nullptr && recorder_->enabled && options_.recall_every > 0 &&
         recorder_->context.step >= 0 && recorder_->context.step % options_.recall_every == 0 &&
         !recorder_->has_recall(layer);
}

std::vector<std::int64_t> PatternSource::query_counts(int told) const {
  std::vector<std::int64_t> counts;
  for (int s = 0; s < axis_.segments(); ++s)
    counts.push_back(axis_.count[s] > 0 ? count_told(axes().first_query[s],
                                                     axis_.first_position[s] + axis_.count[s], told)
                                        : 0);
  return counts;
}

std::vector<double> PatternSource::mean_coverage(Tensor sums, std::int64_t heads, int told) const {
  join(sp_, sums, Reduction::sum);
  const std::vector<std::int64_t> counts = query_counts(told);
  const std::int64_t queries =
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) * heads * sp_.size();
  const Tensor all = sums.to(host_device());
  std::vector<double> mean;
  for (std::int64_t i = 0; i < all.numel(); ++i)
    mean.push_back(queries > 0 ? static_cast<double>(all.data<std::int64_t>()[i]) /
                                     (kCoverageUnit * static_cast<double>(queries))
                               : 1.0);
  return mean;
}

std::int64_t PatternSource::choose(int layer, const std::vector<double>& coverage) const {
  const std::int64_t chosen = policy_->choose(layer, coverage);
  if (observes_recall(layer))
    for (std::size_t i = 0; i < coverage.size(); ++i) {
      CoverageRow row;
      row.layer = layer;
      row.budget = policy_->candidates()[i];
      row.coverage = coverage[i];
      row.chosen = row.budget == chosen;
      recorder_->coverage(row);
    }
  return chosen;
}

void PatternSource::join(const Communicator& ranks, Tensor& tensor, Reduction reduction) const {
  if (ranks.size() == 1 || tensor.numel() == 0) return;
  Scope wait(recorder_, EventKind::ring_wait);
  wait.bytes = static_cast<std::int64_t>(tensor.bytes());
  ranks.all_reduce(tensor, reduction);
}

Tensor PatternSource::gather(const Tensor& mine) const {
  Tensor all = Tensor::empty({cp_.size() * mine.numel()}, DType::i64, host_device(),
                             MemoryCategory::communication);
  Scope wait(recorder_, EventKind::ring_wait);
  wait.bytes = static_cast<std::int64_t>(mine.bytes());
  cp_.all_gather(mine, all);
  return all;
}

namespace {

struct Context {
  const Communicator& cp;
  const Communicator& sp;
  const AttentionOptions& options;
  BudgetPolicy* policy;
  Recorder* recorder;
  std::shared_ptr<SlashCarry> carry;
};

template <class Source>
std::unique_ptr<IndexSource> scored(AttentionAxes axes, const Context& x) {
  return std::make_unique<Source>(x.cp, x.sp, std::move(axes), x.options, x.policy, x.recorder,
                                  x.carry);
}
std::unique_ptr<IndexSource> dense(AttentionAxes axes, const Context& x) {
  return std::make_unique<DenseSource>(std::move(axes), x.recorder);
}

/// The one list of sources.
constexpr struct {
  PatternKind kind;
  std::unique_ptr<IndexSource> (*make)(AttentionAxes axes, const Context& context);
} kSources[] = {{PatternKind::dense, dense},
                {PatternKind::vertical_slash, scored<VerticalSlashSource>},
                {PatternKind::moba, scored<MobaSource>},
                {PatternKind::xattention, scored<XAttentionSource>},
                {PatternKind::by_head, scored<HeadsSource>},
                {PatternKind::flexprefill, scored<HeadsSource>}};
static_assert(std::size(kSources) == EnumNames<PatternKind>::table.size(),
              "a pattern without a source");

}  // namespace

std::unique_ptr<IndexSource> pattern_source(const Communicator& cp, AttentionAxes axes,
                                            const AttentionOptions& options, BudgetPolicy* policy,
                                            Recorder* recorder, const Communicator& sp,
                                            std::shared_ptr<SlashCarry> carry) {
  const auto* row = std::find_if(std::begin(kSources), std::end(kSources),
                                 [&](const auto& x) { return x.kind == options.pattern; });
  require(row != std::end(kSources), "attention pattern {} has no source",
          static_cast<int>(options.pattern));
  return row->make(std::move(axes), {cp, sp, options, policy, recorder, std::move(carry)});
}

}  // namespace ballast
