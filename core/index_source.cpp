#include "core/index_source.hpp"

#include <algorithm>
#include <map>

#include "core/error.hpp"

namespace ballast {
namespace {

/// A head's slashes as ranges [first, last] of neighbouring offsets, farthest first: for a query block they ascend in key block.
std::vector<std::pair<std::int32_t, std::int32_t>> slash_ranges(const std::vector<std::int32_t>& slashes) {
  std::vector<std::pair<std::int32_t, std::int32_t>> ranges;
  for (std::int32_t d : slashes) {
    if (!ranges.empty() && ranges.back().second + 1 == d)
      ranges.back().second = d;
    else
      ranges.emplace_back(d, d);
  }
  std::reverse(ranges.begin(), ranges.end());
  return ranges;
}

}  // namespace

DenseSource::DenseSource(AttentionAxes axes_, Recorder* recorder) : IndexSource(std::move(axes_)) {
  Scope scope(recorder, EventKind::indexing);
  for (const auto& keys : axes().keys) shards_.push_back(dense_index(axes().queries, keys));
}

std::unique_ptr<IndexSource> dense_source(const MicroBatch& batch, const SequenceLayout& layout, int rank, Recorder* recorder) {
  return std::make_unique<DenseSource>(attention_axes(batch, layout, rank), recorder);
}

AttentionIndex generated_index(const std::vector<AxisToken>& queries, const KeyAxis& axis, const GeneratedPattern& pattern) {
  const std::vector<QueryBlock> blocks = query_blocks(queries, axis);
  AttentionIndex index = visible_index(queries, axis, pattern.heads);
  index.segments = std::max(1, axis.segments());
  for (const QueryBlock& block : blocks) index.block_segment.push_back(block.segment);
  std::map<std::int64_t, std::vector<GeneratedHead>> of_length;
  std::vector<const std::vector<GeneratedHead>*> of_segment;
  for (int s = 0; s < axis.segments(); ++s) {
    const std::int64_t tokens = axis.offset[s + 1] - axis.offset[s];
    auto& heads = of_length[tokens];
    if (heads.empty() && tokens > 0) {
      GeneratedPattern own = pattern;
      own.tokens = tokens;
      own.columns = std::min(pattern.columns, tokens / 16);
      heads = pattern.density < 1 ? generate(own) : std::vector<GeneratedHead>(pattern.heads, dense_head(tokens));
    }
    of_segment.push_back(&heads);
  }
  index.run_offset.push_back(0);
  index.bar_offset.push_back(0);
  for (int h = 0; h < pattern.heads; ++h) {
    std::vector<std::vector<std::pair<std::int32_t, std::int32_t>>> ranges(axis.segments());
    for (int s = 0; s < axis.segments(); ++s) {
      if (of_segment[s]->empty()) continue;
      ranges[s] = slash_ranges((*of_segment[s])[h].slashes);
      for (std::int64_t c : (*of_segment[s])[h].columns)
        if (c < axis.count[s]) index.bars.push_back(static_cast<std::int32_t>(axis.offset[s] + c));
      index.bar_offset.push_back(static_cast<std::int64_t>(index.bars.size()));
    }
    if (axis.segments() == 0) index.bar_offset.push_back(0);
    for (const QueryBlock& block : blocks) {
      const auto base = static_cast<std::int32_t>(axis.offset[block.segment] / kBlock + block.block);
      for (const auto& [near, far] : ranges[block.segment]) {
        if (near > block.block) continue;
        const std::int32_t reach = std::min(far, static_cast<std::int32_t>(block.block));
        index.runs.push_back({base - reach, base - near + 1, -1});
      }
      index.run_offset.push_back(static_cast<std::int64_t>(index.runs.size()));
    }
  }
  cover_bars(index);
  return index;
}

std::vector<std::int64_t> IndexCache::shape_key(const AttentionAxes& axes) {
  std::vector<std::int64_t> key{axes.rank};
  const auto add = [&](const std::vector<AxisToken>& tokens) {  // (segment, first position, tokens) of every gapless stretch
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool padding = tokens[i].segment < 0;
      if (i > 0 && tokens[i].segment == tokens[i - 1].segment && (padding || tokens[i].position == tokens[i - 1].position + 1))
        ++key.back();
      else
        key.insert(key.end(), {tokens[i].segment, tokens[i].position, 1});
    }
    key.push_back(-2);  // ends the axis
  };
  add(axes.queries);
  for (const auto& keys : axes.keys) add(keys);
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

GeneratedSource::GeneratedSource(AttentionAxes axes_, const GeneratedPattern& pattern, IndexCache& cache, Recorder* recorder)
    : IndexSource(std::move(axes_)) {
  Scope scope(recorder, EventKind::indexing);
  shards_ = cache.get(axes(), pattern.first_head, pattern.heads, [&] {
    const KeyAxis axis = key_axis(axes().keys);
    return split_keys(generated_index(axes().queries, axis, pattern), axis, axes().keys);
  });
}

}  // namespace ballast
