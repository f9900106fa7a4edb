#include "core/plan/attention/vertical_slash.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

/// Slashes as ranges [near, far] of neighbouring offsets, farthest first: for a query block they
/// ascend in key block.
std::vector<std::pair<std::int32_t, std::int32_t>> slash_ranges(
    const std::vector<std::int32_t>& slashes) {
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

VerticalSlash dense_head(std::int64_t tokens) {
  VerticalSlash head;
  head.slashes.resize((tokens + kBlock - 1) / kBlock);
  std::iota(head.slashes.begin(), head.slashes.end(), 0);
  return head;
}

namespace {

/// [query blocks] index of the stretch that a block uses.
std::vector<std::int32_t> stretch_of_blocks(const std::vector<QueryBlock>& blocks,
                                            std::span<const SlashStretch> stretches) {
  std::vector<std::int32_t> of_block;
  for (const QueryBlock& block : blocks) {
    const auto behind = std::upper_bound(stretches.begin(), stretches.end(), block,
                                         [](const QueryBlock& a, const SlashStretch& b) {
                                           return std::pair(std::int64_t{a.segment}, a.block) <
                                                  std::pair(std::int64_t{b.segment}, b.first);
                                         });
    require(behind != stretches.begin() && std::prev(behind)->segment == block.segment,
            "vertical-slash pattern: block {} of segment {} lies in no stretch", block.block,
            block.segment);
    of_block.push_back(static_cast<std::int32_t>(behind - stretches.begin() - 1));
  }
  return of_block;
}

using BlockRanges = std::vector<std::pair<std::int32_t, std::int32_t>>;

/// Adds the runs of one query block, which come in order; those that touch become one.
class RunList {
 public:
  explicit RunList(PatternArrays& x) : x_(x), start_(x.runs.size()) {}
  void add(std::int32_t begin, std::int32_t end) {
    if (begin >= end) return;
    if (x_.runs.size() > start_ && x_.runs.back().last >= begin)
      x_.runs.back().last = std::max(x_.runs.back().last, end);
    else
      x_.runs.push_back({begin, end, -1});
  }

 private:
  PatternArrays& x_;
  const std::size_t start_;
};

/// Runs of one query block: the sink, its slashes below `local`, the blocks from there on.
void add_runs(PatternArrays& x, const QueryBlock& block, const KeyAxis& axis,
              const BlockRanges& slashes, std::int64_t local, bool sink) {
  const auto first = static_cast<std::int32_t>(axis.offset[block.segment] / kBlock),
             own = first + static_cast<std::int32_t>(block.block),
             limit = std::min(own + 1, first + static_cast<std::int32_t>(local));
  RunList runs(x);
  if (sink) runs.add(first, first + 1);
  for (const auto& [near, far] : slashes)
    if (near <= block.block)
      runs.add(own - std::min(far, static_cast<std::int32_t>(block.block)),
               std::min(limit, own - near + 1));
  runs.add(limit, own + 1);
}

/// Runs of one query block from its chosen blocks of keys; its own is one of them, whatever was
/// chosen.
void add_chosen(PatternArrays& x, const QueryBlock& block, const KeyAxis& axis,
                const std::int64_t* words, bool sink) {
  const auto first = static_cast<std::int32_t>(axis.offset[block.segment] / kBlock);
  RunList runs(x);
  if (block.tokens == 0) return;
  for (std::int32_t j = 0; j <= block.block; ++j)
    if (words[j] != 0 || j == block.block || (sink && j == 0)) runs.add(first + j, first + j + 1);
}

}  // namespace

AttentionPattern vertical_slash_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                        std::span<const SlashStretch> stretches, bool sink,
                                        const ChosenBlocks* chosen) {
  const std::vector<QueryBlock> blocks = query_blocks(queries, axis);
  std::size_t count = 1;
  for (const SlashStretch& stretch : stretches) count = std::max(count, stretch.heads.size());
  PatternArrays x;
  x.visible = visible_keys(queries, axis);
  x.k_tokens = axis.tokens();
  x.index_heads = static_cast<int>(count);
  x.segments = std::max(1, static_cast<int>(stretches.size()));
  x.block_segment = stretch_of_blocks(blocks, stretches);
  x.run_offset.push_back(0);
  x.column_offset.push_back(0);
  for (std::size_t h = 0; h < count; ++h) {
    std::vector<BlockRanges> ranges(stretches.size());
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      const auto& [segment, first, local, heads] = stretches[i];
      if (!heads.empty()) {
        ranges[i] = slash_ranges(heads.at(h).slashes);
        for (const std::int64_t c : heads[h].columns)
          if (c < axis.count[segment])
            x.columns.push_back(static_cast<std::int32_t>(axis.offset[segment] + c));
      }
      x.column_offset.push_back(static_cast<std::int64_t>(x.columns.size()));
    }
    if (stretches.empty()) x.column_offset.push_back(0);
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const auto i = static_cast<std::size_t>(x.block_segment[b]);
      const SlashStretch& stretch = stretches[i];
      const std::int64_t everything = blocks[b].block + 1;
      if (chosen != nullptr && chosen->heads[i * count + h] != 0)
        add_chosen(x, blocks[b], axis,
                   chosen->words + static_cast<std::int64_t>(h * blocks.size() + b) * chosen->width,
                   sink);
      else
        add_runs(x, blocks[b], axis, ranges[i], stretch.local ? stretch.first : everything, sink);
      x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    }
  }
  if (x.columns.empty())
    x.column_offset.clear();
  else
    cover_columns(x);
  return AttentionPattern(std::move(x));
}

AttentionPattern vertical_slash_pattern(std::span<const AxisRange> queries, const KeyAxis& axis,
                                        const std::vector<std::vector<VerticalSlash>>& heads,
                                        bool sink) {
  require(static_cast<int>(heads.size()) == axis.segments(),
          "vertical-slash pattern: patterns of {} segments for {}", heads.size(), axis.segments());
  std::vector<SlashStretch> stretches;
  for (std::size_t s = 0; s < heads.size(); ++s)
    stretches.push_back({static_cast<int>(s), 0, false, heads[s]});
  return vertical_slash_pattern(queries, axis, stretches, sink);
}

}  // namespace ballast
