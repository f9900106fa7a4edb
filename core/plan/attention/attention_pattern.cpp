#include "core/plan/attention/attention_pattern.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/axis_shards.hpp"

namespace ballast {
namespace {

constexpr std::uint64_t kAllRows = ~std::uint64_t{0};

std::uint64_t rows_of(const PatternArrays& x, const BlockRun& run) {
  return run.row_mask < 0 ? kAllRows : x.row_masks[run.row_mask];
}

/// Bits [first, last) of a word, 0 <= first <= last <= 64.
std::uint64_t bits(int first, int last) {
  const auto below = [](int n) { return n >= 64 ? kAllRows : (std::uint64_t{1} << n) - 1; };
  return below(last) & ~below(first);
}

/// Visible keys of the rows of one query block.
using BlockRows = std::span<const KeyInterval>;

double run_pairs(const PatternArrays& x, BlockRows rows, const BlockRun& run) {
  const std::uint64_t mask = rows_of(x, run);
  const std::int64_t first = std::int64_t{run.first} * kBlock,
                     last = std::min(std::int64_t{run.last} * kBlock, x.k_tokens);
  // Below the diagonal and inside the segment, which is nearly all of a long sequence, every row
  // sees the whole run.
  if (mask == kAllRows && !rows.empty() && rows.back().begin <= first && rows.front().end >= last)
    return static_cast<double>(static_cast<std::int64_t>(rows.size()) * (last - first));
  double sum = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!(mask >> i & 1)) continue;
    const std::int64_t begin = std::max<std::int64_t>(rows[i].begin, first),
                       end = std::min<std::int64_t>(rows[i].end, last);
    if (end > begin) sum += static_cast<double>(end - begin);
  }
  return sum;
}

double column_pairs(const PatternArrays& x, BlockRows rows, int head, std::int64_t block) {
  const std::int64_t list = std::int64_t{head} * x.segments + x.block_segment[block];
  const auto begin = x.columns.begin() + x.column_offset[list],
             end = x.columns.begin() + x.column_offset[list + 1];
  const std::uint64_t* cover = x.cover.data() + x.cover_offset[head * x.q_blocks() + block];
  double sum = 0;
  const auto columns_below = [&](std::int32_t key) {
    return std::lower_bound(begin, end, key) - begin;
  };
  // Rows between whose ends no column lies see the same ones.
  const bool alike = !rows.empty() &&
                     columns_below(rows.front().begin) == columns_below(rows.back().begin) &&
                     columns_below(rows.front().end) == columns_below(rows.back().end);
  for (const KeyInterval& row : alike ? rows.first(1) : rows) {
    const std::int64_t first = columns_below(row.begin), last = columns_below(row.end);
    for (std::int64_t group = first / 64; group * 64 < last; ++group) {
      const auto wanted = bits(static_cast<int>(std::max<std::int64_t>(first - group * 64, 0)),
                               static_cast<int>(std::min<std::int64_t>(last - group * 64, 64)));
      sum += std::popcount(wanted & ~cover[group]);
    }
  }
  return alike ? sum * static_cast<double>(rows.size()) : sum;
}

PatternCounts count(const PatternArrays& x) {
  PatternCounts counts{x.q_tokens(), x.k_tokens, x.index_heads, {}};
  if (x.dense) {
    counts.head_pairs.push_back(x.visible.pairs());
    return counts;
  }
  const std::vector<KeyInterval> rows = x.visible.expand();
  counts.head_pairs.assign(static_cast<std::size_t>(x.index_heads), 0.0);
  for (int h = 0; h < x.index_heads; ++h)
    for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
      double& sum = counts.head_pairs[static_cast<std::size_t>(h)];
      const BlockRows block = BlockRows(rows)
                                  .subspan(static_cast<std::size_t>(b * kBlock))
                                  .first(static_cast<std::size_t>(
                                      std::min<std::int64_t>(kBlock, x.q_tokens() - b * kBlock)));
      for (const BlockRun& run : runs_of(x, h, b)) sum += run_pairs(x, block, run);
      if (x.has_columns()) sum += column_pairs(x, block, h, b);
    }
  return counts;
}

/// The key blocks that hold all visible keys of a query block.
BlockRun whole_run(const PatternArrays& x, std::int64_t block) {
  BlockRun run;
  std::int32_t low = 0, high = 0;
  x.visible.for_rows(block * kBlock, std::min((block + 1) * kBlock, x.q_tokens()),
                     [&](std::int64_t, KeyInterval keys) {
                       if (keys.begin == keys.end) return;
                       if (high == 0) low = keys.begin;
                       high = keys.end;
                     });
  if (high > 0) run = {low / kBlock, (high + kBlock - 1) / kBlock, -1};
  return run;
}

}  // namespace

BlockRuns runs_of(const PatternArrays& x, int index_head, std::int64_t query_block) {
  if (x.dense) return BlockRuns(whole_run(x, query_block));
  const std::int64_t list = index_head * x.q_blocks() + query_block, first = x.run_offset[list];
  return BlockRuns(std::span(x.runs).subspan(
      static_cast<std::size_t>(first), static_cast<std::size_t>(x.run_offset[list + 1] - first)));
}

double PatternCounts::pairs_per_head() const {
  return std::accumulate(head_pairs.begin(), head_pairs.end(), 0.0) /
         static_cast<double>(std::max<std::size_t>(1, head_pairs.size()));
}

double PatternCounts::pairs(int head) const {
  return head_pairs.size() == 1 ? head_pairs.front()
                                : head_pairs.at(static_cast<std::size_t>(head));
}

AttentionPattern::AttentionPattern() : AttentionPattern(dense_pattern({}, {})) {}

AttentionPattern::AttentionPattern(PatternArrays arrays) {
  PatternCounts counts = count(arrays);
  made_ = std::make_shared<const Made>(Made{std::move(arrays), std::move(counts)});
}

namespace {

/// Keys of one segment on a key axis, and how far its queries have come.
struct SegmentKeys {
  std::size_t end_range = 0;  ///< of the key axis
  std::int64_t begin = 0;     ///< key
  std::size_t range = 0;      ///< that the latest query's position lies in or before
  std::int64_t below = 0;     ///< keys before that range
  std::int64_t latest = std::numeric_limits<std::int64_t>::min();
};

std::unordered_map<std::int32_t, SegmentKeys> segment_keys(std::span<const AxisRange> keys) {
  std::unordered_map<std::int32_t, SegmentKeys> found;
  std::int64_t at = 0;
  SegmentKeys* segment = nullptr;
  for (std::size_t r = 0; r < keys.size(); at += keys[r++].count) {
    if (keys[r].padding()) continue;  // ends its segment's keys
    if (r > 0 && keys[r].segment == keys[r - 1].segment) {
      require(keys[r].position >= keys[r - 1].end(),
              "attention pattern: key {} of segment {} does not ascend in position", at,
              keys[r].segment);
    } else {
      const auto [place, fresh] = found.try_emplace(keys[r].segment, SegmentKeys{r, at, r, at});
      require(fresh, "attention pattern: keys of segment {} are not adjacent (key {})",
              keys[r].segment, at);
      segment = &place->second;
    }
    segment->end_range = r + 1;
  }
  return found;
}

/// Adds the rows of one range of queries.
void add_visible(const AxisRange& queries, std::span<const AxisRange> keys, SegmentKeys& segment,
                 VisibleKeys& visible) {
  for (std::int64_t position = queries.position; position < queries.end();) {
    while (segment.range < segment.end_range && keys[segment.range].end() <= position)
      segment.below += keys[segment.range++].count;
    const bool behind = segment.range == segment.end_range;
    const std::int64_t next = behind ? queries.end() : keys[segment.range].position;
    const std::int64_t stop =
        std::min(queries.end(), position < next || behind ? next : keys[segment.range].end());
    const bool inside = !behind && position >= next;
    visible.add(stop - position, segment.begin, segment.below + (inside ? position - next + 1 : 0),
                inside ? 1 : 0);
    position = stop;
  }
  segment.latest = queries.end() - 1;
}

PatternArrays dense_arrays(std::span<const AxisRange> queries, std::span<const AxisRange> keys) {
  constexpr std::int64_t limit = std::numeric_limits<std::int32_t>::max();
  require(token_count(queries) <= limit && token_count(keys) <= limit,
          "attention over {} queries and {} keys: at most {} of each in one call",
          token_count(queries), token_count(keys), limit);
  PatternArrays x;
  x.dense = true;
  x.k_tokens = token_count(keys);
  auto segments = segment_keys(keys);
  KeyInterval last;  // of the row before: a row of a segment without keys repeats its end, so that
                     // bounds never decrease
  auto found = segments.end();
  for (const AxisRange& range : queries) {
    const std::int64_t row = x.visible.rows();
    const std::size_t before = x.visible.ranges().size();
    if (found == segments.end() || found->first != range.segment)
      found = range.padding() ? segments.end() : segments.find(range.segment);
    if (found == segments.end()) {
      x.visible.add(range.count, last.end, last.end, 0);
    } else {
      require(range.position >= found->second.latest,
              "attention pattern: query {} of segment {} does not ascend in position", row,
              range.segment);
      add_visible(range, keys, found->second, x.visible);
    }
    const std::vector<VisibleRange>& ranges = x.visible.ranges();
    if (ranges.size() > before) {  // else the rows continue the range before
      const KeyInterval first = ranges[before].at(ranges[before].row);
      require(first.begin >= last.begin && first.end >= last.end,
              "attention pattern: segment {} (query {}) comes in another order among the keys than "
              "among the queries",
              range.segment, row);
    }
    last = ranges.back().at(x.visible.rows() - 1);
  }
  return x;
}

}  // namespace

AttentionPattern dense_pattern(std::span<const AxisRange> queries,
                               std::span<const AxisRange> keys) {
  return AttentionPattern(dense_arrays(queries, keys));
}

std::vector<AttentionPattern> dense_patterns(std::span<const AxisRange> queries,
                                             const AxisShards& keys) {
  std::vector<AttentionPattern> patterns;
  patterns.reserve(keys.size());
  for (std::size_t shard = 0; shard < keys.size(); ++shard) {
    PatternArrays arrays = dense_arrays(queries, keys[shard]);
    const bool again = !patterns.empty() && patterns.back().arrays().k_tokens == arrays.k_tokens &&
                       patterns.back().arrays().visible.ranges() == arrays.visible.ranges();
    patterns.push_back(again ? patterns.back() : AttentionPattern(std::move(arrays)));
  }
  return patterns;
}

namespace {
/// Cover words of every (index head, query block), as cover_columns defines them.
void compute_cover(const PatternArrays& x, std::vector<std::int64_t>& offset,
                   std::vector<std::uint64_t>& cover) {
  offset.assign(1, 0);
  cover.clear();
  for (int h = 0; h < x.index_heads; ++h) {
    for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
      const std::int64_t list = std::int64_t{h} * x.segments + x.block_segment[b];
      const std::int64_t first = x.column_offset[list], count = x.column_offset[list + 1] - first;
      const std::size_t base = cover.size();
      cover.resize(base + (count + 63) / 64, 0);
      std::int64_t run = x.run_offset[h * x.q_blocks() + b];
      const std::int64_t runs_end = x.run_offset[h * x.q_blocks() + b + 1];
      for (std::int64_t j = 0; j < count; ++j) {  // columns and runs both ascend
        const std::int32_t block = x.columns[first + j] / kBlock;
        while (run < runs_end && x.runs[run].last <= block) ++run;
        if (run < runs_end && x.runs[run].first <= block)
          cover[base + j / 64] |= std::uint64_t{1} << (j % 64);
      }
      offset.push_back(static_cast<std::int64_t>(cover.size()));
    }
  }
}
}  // namespace

void cover_columns(PatternArrays& x) {
  x.cover_offset.clear();
  x.cover.clear();
  if (x.column_offset.empty()) return;
  require(x.row_masks.empty(), "attention pattern: columns and row masks exclude each other");
  compute_cover(x, x.cover_offset, x.cover);
}

namespace {

/// Offsets of `lists` lists in an array of `entries`: right length, from 0 to entries, never
/// decreasing.
std::string offset_problems(const char* what, const std::vector<std::int64_t>& offset,
                            std::int64_t lists, std::size_t entries) {
  if (static_cast<std::int64_t>(offset.size()) != lists + 1)
    return fmt::format("{} has {} entries, expected {}", what, offset.size(), lists + 1);
  if (offset.front() != 0 || offset.back() != static_cast<std::int64_t>(entries))
    return fmt::format("{} goes from {} to {}, expected 0 to {}", what, offset.front(),
                       offset.back(), entries);
  if (!std::is_sorted(offset.begin(), offset.end())) return fmt::format("{} decreases", what);
  return "";
}

std::string row_problems(const PatternArrays& x) {
  if (x.k_tokens < 0) return fmt::format("{} keys", x.k_tokens);
  std::string text;
  KeyInterval last;
  x.visible.for_rows(0, x.q_tokens(), [&](std::int64_t i, KeyInterval keys) {
    if (!text.empty()) return;
    if (keys.begin < 0 || keys.end < keys.begin || keys.end > x.k_tokens)
      text = fmt::format("query {} sees keys [{}, {}) of {}", i, keys.begin, keys.end, x.k_tokens);
    else if (keys.begin < last.begin || keys.end < last.end)
      text = fmt::format("query {} sees keys [{}, {}), before those of query {}", i, keys.begin,
                         keys.end, i - 1);
    last = keys;
  });
  return text;
}

std::string run_problems(const PatternArrays& x) {
  if (x.index_heads < 1) return fmt::format("index_heads = {}", x.index_heads);
  if (x.dense)
    return x.index_heads == 1 && x.run_offset.empty() && x.runs.empty() && x.row_masks.empty() &&
                   x.column_offset.empty()
               ? ""
               : "a dense pattern with several heads, runs or columns";
  const std::int64_t lists = x.index_heads * x.q_blocks();
  if (auto text = offset_problems("run_offset", x.run_offset, lists, x.runs.size()); !text.empty())
    return text;
  for (std::int64_t list = 0; list < lists; ++list) {
    std::int32_t row_end[kBlock] =
        {};  // per row of the block, the first key block that no run has covered yet
    for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
      const BlockRun& run = x.runs[r];
      const auto place = [&] {
        return fmt::format("run {} [{}, {}) of index head {}, query block {}", r, run.first,
                           run.last, list / x.q_blocks(), list % x.q_blocks());
      };
      if (run.first < 0 || run.last <= run.first || run.last > x.k_blocks())
        return fmt::format("{} lies outside the {} key blocks or is empty", place(), x.k_blocks());
      if (run.row_mask < -1 || run.row_mask >= static_cast<std::int64_t>(x.row_masks.size()))
        return fmt::format("{} names row mask {} of {}", place(), run.row_mask, x.row_masks.size());
      if (r > x.run_offset[list] && run.first < x.runs[r - 1].first)
        return fmt::format("{} is out of order", place());
      const std::uint64_t rows = rows_of(x, run);
      for (int i = 0; i < kBlock; ++i) {
        if (!(rows >> i & 1)) continue;
        if (run.first < row_end[i])
          return fmt::format("{} counts pairs of row {} twice", place(), i);
        row_end[i] = run.last;
      }
    }
  }
  return "";
}

std::string column_problems(const PatternArrays& x) {
  if (x.column_offset.empty()) return x.columns.empty() ? "" : "columns without column_offset";
  if (!x.row_masks.empty()) return "columns and row masks exclude each other";
  if (x.segments < 1) return fmt::format("segments = {}", x.segments);
  if (auto text = offset_problems("column_offset", x.column_offset,
                                  std::int64_t{x.index_heads} * x.segments, x.columns.size());
      !text.empty())
    return text;
  if (static_cast<std::int64_t>(x.block_segment.size()) != x.q_blocks())
    return fmt::format("block_segment has {} entries for {} query blocks", x.block_segment.size(),
                       x.q_blocks());
  for (std::int32_t segment : x.block_segment)
    if (segment < 0 || segment >= x.segments)
      return fmt::format("block_segment names segment {} of {}", segment, x.segments);
  for (std::size_t list = 0; list + 1 < x.column_offset.size(); ++list) {
    for (std::int64_t j = x.column_offset[list]; j < x.column_offset[list + 1]; ++j) {
      if (x.columns[j] < 0 || x.columns[j] >= x.k_tokens)
        return fmt::format("column {} is key {} of {}", j, x.columns[j], x.k_tokens);
      if (j > x.column_offset[list] && x.columns[j] <= x.columns[j - 1])
        return fmt::format("column {} (key {}) does not ascend", j, x.columns[j]);
    }
  }
  std::vector<std::int64_t> offset;
  std::vector<std::uint64_t> cover;
  compute_cover(x, offset, cover);
  if (offset != x.cover_offset || cover != x.cover)
    return "cover words do not fit runs and columns; call cover_columns() after both are set";
  return "";
}

}  // namespace

std::string problems(const PatternArrays& x) {
  for (auto* check : {row_problems, run_problems, column_problems})
    if (auto text = check(x); !text.empty()) return "attention pattern: " + text;
  return "";
}

}  // namespace ballast
