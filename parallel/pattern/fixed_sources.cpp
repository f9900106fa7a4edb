#include "parallel/pattern/fixed_sources.hpp"

#include <limits>
#include <tuple>

#include "core/base/error.hpp"

namespace ballast {
namespace {

std::vector<AttentionPattern> dense_patterns(const AttentionAxes& axes, Recorder* recorder) {
  Scope scope(recorder, EventKind::indexing);
  return ballast::dense_patterns(axes.queries, axes.calls());
}

/// A pattern that is not chosen here has none.
std::tuple<double, std::int64_t, double, int> no_budget(int) {
  return {std::numeric_limits<double>::quiet_NaN(), 0, 0.0, -1};
}

}  // namespace

DenseSource::DenseSource(AttentionAxes axes_, Recorder* recorder)
    : IndexSource(std::move(axes_)), patterns_(dense_patterns(axes(), recorder)) {}

std::unique_ptr<IndexSource> dense_source(const MicroBatch& batch, const SequenceLayout& layout,
                                          int rank, Recorder* recorder) {
  return std::make_unique<DenseSource>(attention_axes(batch, layout, rank), recorder);
}

IndexCache::Shards IndexCache::find(const Shape& shape) {
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    if (it->first != shape) continue;
    kept_.splice(kept_.begin(), kept_, it);
    return kept_.front().second;
  }
  return nullptr;
}

GeneratedSource::GeneratedSource(AttentionAxes axes_, const GeneratedPattern& pattern,
                                 IndexCache& cache, Recorder* recorder)
    : IndexSource(std::move(axes_)) {
  Scope scope(recorder, EventKind::indexing);
  const KeyAxis axis = key_axis(axes());
  shards_ = cache.get(axes(), pattern.first_head, pattern.heads, [&] {
    return split_keys(generated_pattern(axes().queries, axis, pattern), axis, axes().calls());
  });
  record_budgets(recorder, -1, pattern.heads, shards_->patterns(),
                 visible_keys(axes().queries, axis).pairs(), no_budget);
}

RecordedSource::RecordedSource(AttentionAxes axes_, std::shared_ptr<const RecordedIndexes> recorded,
                               int first_head, int heads, Recorder* recorder)
    : IndexSource(std::move(axes_)),
      recorded_(std::move(recorded)),
      first_head_(first_head),
      heads_(heads),
      recorder_(recorder),
      axis_(key_axis(axes())) {
  require(recorded_ != nullptr, "recorded indexes: none were read");
}

const std::vector<AttentionWork>& RecordedSource::shards(const AttentionInputs& in) {
  const auto found = layers_.find(in.layer);
  if (found != layers_.end()) return found->second.at(in.q, in.k);
  Scope scope(recorder_, EventKind::indexing);
  PlacedPatterns made(
      split_keys(recorded_pattern(axes().queries, axis_, *recorded_, in.layer, first_head_, heads_),
                 axis_, axes().calls()));
  record_budgets(recorder_, in.layer, heads_, made.patterns(),
                 visible_keys(axes().queries, axis_).pairs(), no_budget);
  return layers_.emplace(in.layer, std::move(made)).first->second.at(in.q, in.k);
}

}  // namespace ballast
