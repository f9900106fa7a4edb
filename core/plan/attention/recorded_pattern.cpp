#include "core/plan/attention/recorded_pattern.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

void RecordedIndexes::add(int layer, int head, RecordedHead recorded) {
  layers_ = std::max(layers_, layer + 1);
  heads_ = std::max(heads_, head + 1);
  by_stretches_ = by_stretches_ || recorded.stretches.size() > 1;
  of_[{layer, head}].push_back(std::move(recorded));
}

const RecordedHead& RecordedIndexes::at(int layer, int head, std::int64_t tokens) const {
  require(!empty(), "recorded indexes: there are none");
  const auto found = of_.find({layer % layers_, head % heads_});
  require(found != of_.end(), "recorded indexes: nothing of layer {}, head {}", layer % layers_,
          head % heads_);
  const auto distance = [tokens](const RecordedHead& a) {
    return std::abs(std::log(static_cast<double>(std::max<std::int64_t>(1, a.tokens)) /
                             static_cast<double>(std::max<std::int64_t>(1, tokens))));
  };
  return *std::min_element(
      found->second.begin(), found->second.end(),
      [&](const RecordedHead& a, const RecordedHead& b) { return distance(a) < distance(b); });
}

std::vector<SlashStretch> RecordedIndexes::stretches(int layer, int first_head, int heads,
                                                     std::int64_t tokens) const {
  std::vector<SlashStretch> all;
  for (const RecordedHead::Stretch& stretch : at(layer, first_head, tokens).stretches)
    if (stretch.first * kBlock < std::max<std::int64_t>(1, tokens))
      all.push_back({0, stretch.first, stretch.local, {}});
  for (int h = first_head; h < first_head + heads; ++h) {
    const RecordedHead& head = at(layer, h, tokens);
    require(head.stretches.size() >= all.size(),
            "recorded indexes: heads {} and {} of layer {} have other stretches", first_head, h,
            layer);
    for (std::size_t i = 0; i < all.size(); ++i) {
      require(head.stretches[i].first == all[i].first,
              "recorded indexes: heads {} and {} of layer {} have other stretches", first_head, h,
              layer);
      all[i].heads.push_back(head.stretches[i].choice);
    }
  }
  return all;
}

AttentionPattern recorded_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                  const RecordedIndexes& recorded, int layer, int first_head,
                                  int heads) {
  std::vector<SlashStretch> all;
  for (int s = 0; s < axis.segments(); ++s)
    for (SlashStretch& stretch : recorded.stretches(layer, first_head, heads, axis.count[s])) {
      stretch.segment = s;
      all.push_back(std::move(stretch));
    }
  return vertical_slash_pattern(queries, axis, all, true);
}

std::vector<VerticalSlash> recorded_heads(const RecordedIndexes& recorded, std::int64_t tokens) {
  std::vector<VerticalSlash> all;
  for (int layer = 0; layer < recorded.layers(); ++layer)
    for (int head = 0; head < recorded.heads(); ++head) {
      const RecordedHead& from = recorded.at(layer, head, tokens);
      require(from.stretches.size() == 1,
              "recorded indexes: a choice by stretches (attention.selection = \"causal\"), which "
              "plans do not balance");
      VerticalSlash kept;
      for (const std::int32_t d : from.stretches.front().choice.slashes)
        if (d * std::int64_t{kBlock} < tokens) kept.slashes.push_back(d);
      kept.columns.resize(static_cast<std::size_t>(std::min<std::int64_t>(kBlock, tokens)));
      std::iota(kept.columns.begin(), kept.columns.end(), std::int64_t{0});
      for (const std::int64_t c : from.stretches.front().choice.columns)
        if (c >= kBlock && c < tokens) kept.columns.push_back(c);
      all.push_back(std::move(kept));
    }
  return all;
}

}  // namespace ballast
