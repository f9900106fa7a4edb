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
  bool holds(std::int64_t g) const { return below[g + 1] > below[g]; }
  /// Keys of the shard before global key x.
  std::int32_t lower_bound(std::int64_t x) const {
    const std::int64_t g = x / kBlock, inside = x % kBlock;
    return below[g] * kBlock + (inside > 0 && holds(g) ? static_cast<std::int32_t>(inside) : 0);
  }
};

ShardBlocks shard_blocks(const KeyAxis& axis, const std::vector<AxisToken>& keys) {
  ShardBlocks blocks;
  blocks.below.assign(axis.tokens() / kBlock + 1, 0);
  for (const std::int32_t g : global_blocks(axis, keys)) blocks.below[g + 1] = 1;
  for (std::size_t g = 1; g < blocks.below.size(); ++g) blocks.below[g] += blocks.below[g - 1];
  return blocks;
}

AttentionPattern cut(const AttentionPattern& index, const ShardBlocks& shard, std::int64_t tokens) {
  AttentionPattern out;
  out.q_tokens = index.q_tokens;
  out.k_tokens = tokens;
  out.index_heads = index.index_heads;
  out.key_begin.resize(index.q_tokens);
  out.key_end.resize(index.q_tokens);
  for (std::int64_t i = 0; i < index.q_tokens; ++i) {
    out.key_begin[i] = shard.lower_bound(index.key_begin[i]);
    out.key_end[i] = shard.lower_bound(index.key_end[i]);
  }
  std::vector<std::int32_t> mask_of(index.row_masks.size(), -1);
  out.run_offset.reserve(index.run_offset.size());
  out.run_offset.push_back(0);
  for (std::size_t list = 0; list + 1 < index.run_offset.size(); ++list) {
    const std::size_t start = out.runs.size();
    for (std::int64_t r = index.run_offset[list]; r < index.run_offset[list + 1]; ++r) {
      const BlockRun& run = index.runs[r];
      BlockRun local{shard.below[run.first], shard.below[run.last], run.row_mask};
      if (local.first == local.last) continue;
      if (run.row_mask >= 0) {
        std::int32_t& mask = mask_of[run.row_mask];
        if (mask < 0) {
          mask = static_cast<std::int32_t>(out.row_masks.size());
          out.row_masks.push_back(index.row_masks[run.row_mask]);
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
  out.segments = index.segments;
  out.block_segment = index.block_segment;
  if (index.column_offset.empty()) return out;
  out.column_offset.push_back(0);
  for (std::size_t list = 0; list + 1 < index.column_offset.size(); ++list) {
    for (std::int64_t b = index.column_offset[list]; b < index.column_offset[list + 1]; ++b)
      if (shard.holds(index.columns[b] / kBlock))
        out.columns.push_back(shard.lower_bound(index.columns[b]));
    out.column_offset.push_back(static_cast<std::int64_t>(out.columns.size()));
  }
  cover_columns(out);
  return out;
}

}  // namespace

AttentionAxes attention_axes(const MicroBatch& batch, const SequenceLayout& layout, int rank) {
  AttentionAxes axes;
  axes.rank = rank;
  axes.align = batch.align;
  for (const Segment& segment : batch.segments) axes.first_query.push_back(segment.begin);
  axes.queries = local_tokens(batch, layout, rank);
  for (int shard = 0; shard < layout.ranks(); ++shard)
    axes.keys.push_back(shard == rank ? axes.queries : local_tokens(batch, layout, shard));
  return axes;
}

KeyAxis key_axis(const AttentionAxes& axes) {
  const std::int64_t align = std::max<std::int64_t>(kBlock, axes.align);
  require(align % kBlock == 0,
          "sparse attention: segments that start at multiples of {}, no multiple of {}", align,
          kBlock);
  KeyAxis axis;
  std::vector<std::int64_t> end;
  for (const auto& shard : axes.keys)
    for (const AxisToken& key : shard) {
      if (key.segment < 0) continue;
      const std::size_t s = static_cast<std::size_t>(key.segment);
      if (s >= axis.count.size()) {
        axis.count.resize(s + 1, 0);
        axis.first_position.resize(s + 1, std::numeric_limits<std::int64_t>::max());
        end.resize(s + 1, 0);
      }
      ++axis.count[s];
      axis.first_position[s] = std::min(axis.first_position[s], key.position);
      end[s] = std::max(end[s], key.position + 1);
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

std::vector<std::int32_t> global_blocks(const KeyAxis& axis, const std::vector<AxisToken>& keys) {
  require(keys.size() % kBlock == 0,
          "sparse attention: a shard has {} keys, no multiple of {}; use zigzag, or a stripe that "
          "is a multiple of {}",
          keys.size(), kBlock, kBlock);
  std::vector<std::int32_t> blocks;
  blocks.reserve(keys.size() / kBlock);
  std::int64_t last = -kBlock;
  for (std::size_t first = 0; first < keys.size(); first += kBlock) {
    // A block of padding alone follows the last block of its segment.
    const std::int64_t global = keys[first].segment >= 0 ? axis.global(keys[first]) : last + kBlock;
    bool whole = global % kBlock == 0 && global > last && global < axis.tokens();
    for (std::size_t i = 1; whole && i < kBlock; ++i)
      whole = keys[first + i].segment < 0 ||
              axis.global(keys[first + i]) == global + static_cast<std::int64_t>(i);
    require(whole,
            "sparse attention: a shard cuts a block of {} keys at its key {}; use zigzag, or a "
            "stripe that is a multiple of {}",
            kBlock, first, kBlock);
    blocks.push_back(static_cast<std::int32_t>(global / kBlock));
    last = global;
  }
  return blocks;
}

std::vector<QueryBlock> query_blocks(const std::vector<AxisToken>& queries, const KeyAxis& axis) {
  std::vector<QueryBlock> blocks;
  blocks.reserve(queries.size() / kBlock + 1);
  for (std::size_t first = 0; first < queries.size(); first += kBlock) {
    const AxisToken& token = queries[first];
    if (token.segment < 0 &&
        !blocks.empty()) {  // padding alone: the block after the last of its segment
      blocks.push_back({blocks.back().segment, blocks.back().block + 1});
      continue;
    }
    bool whole =
        token.segment >= 0 && token.segment < axis.segments() && axis.global(token) % kBlock == 0;
    for (std::size_t i = 1; whole && i < std::min<std::size_t>(kBlock, queries.size() - first);
         ++i) {
      const AxisToken& next = queries[first + i];
      whole = next.segment < 0 || (next.segment == token.segment &&
                                   next.position == token.position + static_cast<std::int64_t>(i));
    }
    require(whole,
            "sparse attention: the {} queries from local token {} on do not lie on one block of "
            "keys; use zigzag, or a stripe that is a multiple of {}",
            kBlock, first, kBlock);
    blocks.push_back({token.segment, (axis.global(token) - axis.offset[token.segment]) / kBlock});
  }
  return blocks;
}

AttentionPattern visible_pattern(const std::vector<AxisToken>& queries, const KeyAxis& axis,
                                 int index_heads) {
  AttentionPattern index;
  index.q_tokens = static_cast<std::int64_t>(queries.size());
  index.k_tokens = axis.tokens();
  index.index_heads = index_heads;
  index.key_begin.resize(queries.size());
  index.key_end.resize(queries.size());
  std::int32_t end = 0;
  for (std::size_t i = 0; i < queries.size(); ++i) {
    const AxisToken& token = queries[i];
    std::int32_t begin = end;  // padding repeats the end before it: bounds never decrease
    if (token.segment >= 0) {
      begin = static_cast<std::int32_t>(axis.offset[token.segment]);
      end = static_cast<std::int32_t>(axis.global(token) + 1);
    }
    index.key_begin[i] = begin;
    index.key_end[i] = end;
  }
  return index;
}

double visible_pairs(const std::vector<AxisToken>& queries, const KeyAxis& axis) {
  double pairs = 0;
  for (const AxisToken& query : queries)
    if (query.segment >= 0)
      pairs += static_cast<double>(query.position - axis.first_position[query.segment] + 1);
  return pairs;
}

std::vector<AttentionPattern> split_keys(const AttentionPattern& index, const KeyAxis& axis,
                                         const std::vector<std::vector<AxisToken>>& keys) {
  require(index.k_tokens == axis.tokens(),
          "sparse attention: an index over {} keys, the axis has {}", index.k_tokens,
          axis.tokens());
  std::vector<AttentionPattern> shards;
  shards.reserve(keys.size());
  for (std::size_t s = 0; s < keys.size(); ++s)
    shards.push_back(
        cut(index, shard_blocks(axis, keys[s]), static_cast<std::int64_t>(keys[s].size())));
  return shards;
}

}  // namespace ballast
