#include "core/plan/attention/index_source.hpp"

#include <algorithm>
#include <limits>
#include <map>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
DenseSource::DenseSource(AttentionAxes axes_, Recorder* recorder) : IndexSource(std::move(axes_)) {
  Scope scope(recorder, EventKind::indexing);
  for (const auto& keys : axes().calls()) shards_.push_back(dense_pattern(axes().queries, keys));
}

std::unique_ptr<IndexSource> dense_source(const MicroBatch& batch, const SequenceLayout& layout,
                                          int rank, Recorder* recorder) {
  return std::make_unique<DenseSource>(attention_axes(batch, layout, rank), recorder);
}

AttentionPattern generated_pattern(const std::vector<AxisToken>& queries, const KeyAxis& axis,
                                   const GeneratedPattern& pattern) {
  std::map<std::int64_t, std::vector<GeneratedHead>> of_length;
  std::vector<std::vector<GeneratedHead>> of_segment;
  for (int s = 0; s < axis.segments(); ++s) {
    const std::int64_t tokens = axis.offset[s + 1] - axis.offset[s];
    auto& heads = of_length[tokens];
    if (heads.empty() && tokens > 0) {
      GeneratedPattern own = pattern;
      own.tokens = tokens;
      own.columns = std::min(pattern.columns, tokens / 16);
      heads = pattern.density < 1 ? generate(own)
                                  : std::vector<GeneratedHead>(pattern.heads, dense_head(tokens));
    }
    of_segment.push_back(heads);
  }
  return vertical_slash_pattern(queries, axis, of_segment, false);
}

std::vector<std::int64_t> IndexCache::shape_key(const AttentionAxes& axes) {
  std::vector<std::int64_t> key{axes.rank};
  const auto add = [&](const std::vector<AxisToken>&
                           tokens) {  // (segment, first position, tokens) of every gapless stretch
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool padding = tokens[i].segment < 0;
      if (i > 0 && tokens[i].segment == tokens[i - 1].segment &&
          (padding || tokens[i].position == tokens[i - 1].position + 1))
        ++key.back();
      else
        key.insert(key.end(), {tokens[i].segment, tokens[i].position, 1});
    }
    key.push_back(-2);  // ends the axis
  };
  add(axes.queries);
  for (const auto& keys : axes.calls()) add(keys);
  return key;
}

IndexCache::Shards IndexCache::find(const std::vector<std::int64_t>& key) {
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    if (it->first != key) continue;
    kept_.splice(kept_.begin(), kept_, it);
    return kept_.front().second;
  }
  return nullptr;
}

GeneratedSource::GeneratedSource(AttentionAxes axes_, const GeneratedPattern& pattern,
                                 IndexCache& cache, Recorder* recorder)
    : IndexSource(std::move(axes_)) {
  Scope scope(recorder, EventKind::indexing);
  shards_ = cache.get(axes(), pattern.first_head, pattern.heads, [&] {
    const KeyAxis axis = key_axis(axes());
    return split_keys(generated_pattern(axes().queries, axis, pattern), axis, axes().calls());
  });
  record_budgets(recorder, -1, *shards_, visible_pairs(axes().queries, key_axis(axes())), [](int) {
    return std::pair(std::numeric_limits<double>::quiet_NaN(), std::int64_t{0});
  });
}

}  // namespace ballast
