#include "parallel/pattern/fixed_sources.hpp"

#include <limits>

namespace ballast {
namespace {

std::vector<AttentionPattern> dense_patterns(const AttentionAxes& axes, Recorder* recorder) {
  Scope scope(recorder, EventKind::indexing);
  std::vector<AttentionPattern> patterns;
  patterns.reserve(axes.calls().size());
  for (const AxisRanges& keys : axes.calls()) patterns.push_back(dense_pattern(axes.queries, keys));
  return patterns;
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
  record_budgets(
      recorder, -1, shards_->patterns(), visible_keys(axes().queries, axis).pairs(), [](int) {
        return std::tuple(std::numeric_limits<double>::quiet_NaN(), std::int64_t{0}, 0.0);
      });
}

}  // namespace ballast
