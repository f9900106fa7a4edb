#include "core/plan/attention/key_axis.hpp"

#include <algorithm>
#include <limits>

#include "core/base/error.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

/// Which blocks of the whole key axis a shard holds, and where.
struct ShardBlocks {
  std::vector<std::int32_t> below;  ///< [blocks + 1]: blocks of the shard before global block g
  bool holds(std::int64_t g) const {
    return g + 1 < static_cast<std::int64_t>(below.size()) && below[g + 1] > below[g];
  }
  /// Keys of the shard before global key x.
  std::int32_t lower_bound(std::int64_t x) const {
    const std::int64_t g = x / kBlock, inside = x % kBlock;
    return below[g] * kBlock + (inside > 0 && holds(g) ? static_cast<std::int32_t>(inside) : 0);
  }
};

ShardBlocks shard_blocks(const KeyAxis& axis, std::span<const AxisRange> keys) {
  ShardBlocks blocks;
  blocks.below.assign(axis.tokens() / kBlock + 1, 0);
  for (const std::int32_t g : global_blocks(axis, keys)) blocks.below[g + 1] = 1;
  for (std::size_t g = 1; g < blocks.below.size(); ++g) blocks.below[g] += blocks.below[g - 1];
  return blocks;
}

/// The keys of a shard that rows see of the whole axis.
VisibleKeys cut(const VisibleKeys& visible, const ShardBlocks& shard) {
  VisibleKeys out;
  for (std::size_t r = 0; r < visible.ranges().size(); ++r) {
    const VisibleRange& range = visible.ranges()[r];
    const std::int32_t begin = shard.lower_bound(range.begin);
    if (range.grow == 0) {
      out.add(visible.count(r), begin, shard.lower_bound(range.end), 0);
      continue;
    }
    // Ends grow inside the blocks that the shard holds and stand still in the others.
    const std::int64_t last = range.end + visible.count(r);
    for (std::int64_t end = range.end; end < last;) {
      const std::int64_t block = end / kBlock, stop = std::min(last, (block + 1) * kBlock);
      out.add(stop - end, begin, shard.lower_bound(end), shard.holds(block) ? 1 : 0);
      end = stop;
    }
  }
  return out;
}

/// The runs of a pattern's lists on a shard.
void cut_runs(const PatternArrays& x, const ShardBlocks& shard, PatternArrays& out) {
  std::vector<std::int32_t> mask_of(x.row_masks.size(), -1);
  out.run_offset.reserve(x.run_offset.size());
  out.run_offset.push_back(0);
  for (std::size_t list = 0; list + 1 < x.run_offset.size(); ++list) {
    const std::size_t start = out.runs.size();
    for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
      const BlockRun& run = x.runs[r];
      BlockRun local{shard.below[run.first], shard.below[run.last], run.row_mask};
      if (local.first == local.last) continue;
      if (run.row_mask >= 0) {
        std::int32_t& mask = mask_of[run.row_mask];
        if (mask < 0) {
          mask = static_cast<std::int32_t>(out.row_masks.size());
          out.row_masks.push_back(x.row_masks[run.row_mask]);
        }
        local.row_mask = mask;
      }
      if (out.runs.size() > start && out.runs.back().last == local.first &&
          out.runs.back().row_mask == local.row_mask)
        out.runs.back().last = local.last;
      else
        out.runs.push_back(local);
    }
    out.run_offset.push_back(static_cast<std::int64_t>(out.runs.size()));
  }
}

AttentionPattern cut(const PatternArrays& x, const ShardBlocks& shard, std::int64_t tokens) {
  PatternArrays out;
  out.visible = cut(x.visible, shard);
  out.k_tokens = tokens;
  out.index_heads = x.index_heads;
  out.dense = x.dense;
  if (!x.dense) cut_runs(x, shard, out);
  out.segments = x.segments;
  out.block_segment = x.block_segment;
  if (x.column_offset.empty()) return AttentionPattern(std::move(out));
  out.column_offset.push_back(0);
  for (std::size_t list = 0; list + 1 < x.column_offset.size(); ++list) {
    for (std::int64_t c = x.column_offset[list]; c < x.column_offset[list + 1]; ++c)
      if (shard.holds(x.columns[c] / kBlock))
        out.columns.push_back(shard.lower_bound(x.columns[c]));
    out.column_offset.push_back(static_cast<std::int64_t>(out.columns.size()));
  }
  cover_columns(out);
  return AttentionPattern(std::move(out));
}

}  // namespace

AttentionAxes attention_axes(const MicroBatch& batch, const SequenceLayout& layout, int rank) {
  AttentionAxes axes;
  axes.rank = rank;
  axes.align = batch.align;
  for (const Segment& segment : batch.segments) axes.first_query.push_back(segment.begin);
  axes.keys = AxisShards(batch, layout);
  axes.queries = axes.keys[static_cast<std::size_t>(rank)];
  return axes;
}

KeyAxis key_axis(const AttentionAxes& axes) {
  const std::int64_t align = std::max<std::int64_t>(kBlock, axes.align);
  require(align % kBlock == 0,
          "sparse attention: segments that start at multiples of {}, no multiple of {}", align,
          kBlock);
  KeyAxis axis;
  std::vector<std::int64_t> end;
  for (std::size_t shard = 0; shard < axes.keys.size(); ++shard)
    for (const AxisRange& key : axes.keys[shard]) {
      if (key.padding()) continue;
      const std::size_t s = static_cast<std::size_t>(key.segment);
      if (s >= axis.count.size()) {
        axis.count.resize(s + 1, 0);
        axis.first_position.resize(s + 1, std::numeric_limits<std::int64_t>::max());
        end.resize(s + 1, 0);
      }
      axis.count[s] += key.count;
      axis.first_position[s] = std::min(axis.first_position[s], key.position);
      end[s] = std::max(end[s], key.end());
    }
  axis.offset.push_back(0);
  for (int s = 0; s < axis.segments(); ++s) {
    if (axis.count[s] == 0) axis.first_position[s] = 0;
    const std::int64_t span = axis.count[s] == 0 ? 0 : end[s] - axis.first_position[s];
    require(span == axis.count[s],
            "sparse attention: the shards hold {} keys of segment {}, whose positions span {}",
            axis.count[s], s, span);
    axis.offset.push_back(axis.offset.back() + (span + align - 1) / align * align);
  }
  require(axis.tokens() <= std::numeric_limits<std::int32_t>::max(),
          "sparse attention over {} keys: at most 2^31 - 1 in one call", axis.tokens());
  return axis;
}

std::vector<std::int32_t> global_blocks(const KeyAxis& axis, std::span<const AxisRange> keys) {
  const std::int64_t tokens = token_count(keys);
  require(tokens % kBlock == 0,
          "sparse attention: a shard has {} keys, no multiple of {}; use zigzag, or a stripe that "
          "is a multiple of {}",
          tokens, kBlock, kBlock);
  std::vector<std::int32_t> blocks;
  blocks.reserve(static_cast<std::size_t>(tokens / kBlock));
  std::int64_t last = -kBlock;
  for_each_block(keys, [&](std::int64_t first, std::span<const AxisRange> parts) {
    // A block of padding alone follows the last block of its segment.
    const std::int64_t global =
        parts.front().padding() ? last + kBlock : axis.global(parts.front());
    bool whole = global % kBlock == 0 && global > last && global < axis.tokens();
    std::int64_t at = 0;
    for (const AxisRange& part : parts) {
      whole = whole && (part.padding() || axis.global(part) == global + at);
      at += part.count;
    }
    require(whole,
            "sparse attention: a shard cuts a block of {} keys at its key {}; use zigzag, or a "
            "stripe that is a multiple of {}",
            kBlock, first, kBlock);
    blocks.push_back(static_cast<std::int32_t>(global / kBlock));
    last = global;
  });
  return blocks;
}

std::vector<QueryBlock> query_blocks(std::span<const AxisRange> queries, const KeyAxis& axis) {
  std::vector<QueryBlock> blocks;
  for_each_block(queries, [&](std::int64_t first, std::span<const AxisRange> parts) {
    const AxisRange& token = parts.front();
    if (token.padding() &&
        !blocks.empty()) {  // padding alone: the block after the last of its segment
      blocks.push_back({blocks.back().segment, blocks.back().block + 1, 0});
      return;
    }
    bool whole =
        !token.padding() && token.segment < axis.segments() && axis.global(token) % kBlock == 0;
    std::int64_t at = 0;
    for (const AxisRange& part : parts) {
      whole = whole && (part.padding() ||
                        (part.segment == token.segment && part.position == token.position + at));
      at += part.count;
    }
    require(whole,
            "sparse attention: the {} queries from local token {} on do not lie on one block of "
            "keys; use zigzag, or a stripe that is a multiple of {}",
            kBlock, first, kBlock);
    blocks.push_back({token.segment, (axis.global(token) - axis.offset[token.segment]) / kBlock,
                      static_cast<std::int32_t>(token.count)});
  });
  return blocks;
}

VisibleKeys visible_keys(std::span<const AxisRange> queries, const KeyAxis& axis) {
  VisibleKeys visible;
  std::int64_t end = 0;
  for (const AxisRange& range : queries) {
    if (range.padding()) {  // repeats the end before it: bounds never decrease
      visible.add(range.count, end, end, 0);
      continue;
    }
    const std::int64_t first = axis.global(range);
    visible.add(range.count, axis.offset[range.segment], first + 1, 1);
    end = first + range.count;
  }
  return visible;
}

std::vector<VisibleKeys> split_visible(const VisibleKeys& visible, const KeyAxis& axis,
                                       const AxisShards& keys) {
  std::vector<VisibleKeys> shards;
  shards.reserve(keys.size());
  for (std::size_t shard = 0; shard < keys.size(); ++shard)
    shards.push_back(cut(visible, shard_blocks(axis, keys[shard])));
  return shards;
}

std::vector<AttentionPattern> split_keys(const AttentionPattern& pattern, const KeyAxis& axis,
                                         const AxisShards& keys) {
  require(pattern.k_tokens() == axis.tokens(),
          "sparse attention: a pattern over {} keys, the axis has {}", pattern.k_tokens(),
          axis.tokens());
  std::vector<AttentionPattern> shards;
  shards.reserve(keys.size());
  for (std::size_t s = 0; s < keys.size(); ++s) {
    const AxisRanges shard = keys[s];
    shards.push_back(cut(pattern.arrays(), shard_blocks(axis, shard), token_count(shard)));
  }
  return shards;
}

}  // namespace ballast
