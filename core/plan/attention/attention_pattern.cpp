#include "core/plan/attention/attention_pattern.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "core/base/error.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

constexpr std::uint64_t kAllRows = ~std::uint64_t{0};

std::uint64_t rows_of(const AttentionPattern& index, const BlockRun& run) {
  return run.row_mask < 0 ? kAllRows : index.row_masks[run.row_mask];
}

/// Bits [first, last) of a word, 0 <= first <= last <= 64.
std::uint64_t bits(int first, int last) {
  const auto below = [](int n) { return n >= 64 ? kAllRows : (std::uint64_t{1} << n) - 1; };
  return below(last) & ~below(first);
}

double run_pairs(const AttentionPattern& index, std::int64_t block, const BlockRun& run) {
  const std::int64_t row = block * kBlock,
                     rows = std::min<std::int64_t>(kBlock, index.q_tokens - row);
  const std::uint64_t mask = rows_of(index, run);
  const std::int64_t first = std::int64_t{run.first} * kBlock,
                     last = std::min(std::int64_t{run.last} * kBlock, index.k_tokens);
  // Below the diagonal and inside the segment, which is nearly all of a long sequence, every row
  // sees the whole run.
  if (mask == kAllRows && rows > 0 && index.key_begin[row + rows - 1] <= first &&
      index.key_end[row] >= last)
    return static_cast<double>(rows * (last - first));
  double sum = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (!(mask >> i & 1)) continue;
    const std::int64_t begin = std::max<std::int64_t>(index.key_begin[row + i], first),
                       end = std::min<std::int64_t>(index.key_end[row + i], last);
    if (end > begin) sum += static_cast<double>(end - begin);
  }
  return sum;
}

double column_pairs(const AttentionPattern& index, int head, std::int64_t block) {
  const std::int64_t row = block * kBlock,
                     rows = std::min<std::int64_t>(kBlock, index.q_tokens - row);
  const std::int64_t list = std::int64_t{head} * index.segments + index.block_segment[block];
  const auto begin = index.columns.begin() + index.column_offset[list],
             end = index.columns.begin() + index.column_offset[list + 1];
  const std::uint64_t* cover =
      index.cover.data() + index.cover_offset[head * index.q_blocks() + block];
  double sum = 0;
  const auto columns_below = [&](std::int32_t key) {
    return std::lower_bound(begin, end, key) - begin;
  };
  // Rows between whose ends no column lies see the same ones.
  const bool alike =
      rows > 0 &&
      columns_below(index.key_begin[row]) == columns_below(index.key_begin[row + rows - 1]) &&
      columns_below(index.key_end[row]) == columns_below(index.key_end[row + rows - 1]);
  for (std::int64_t i = 0; i < (alike ? 1 : rows); ++i) {
    const std::int64_t first = columns_below(index.key_begin[row + i]),
                       last = columns_below(index.key_end[row + i]);
    for (std::int64_t group = first / 64; group * 64 < last; ++group) {
      const auto wanted = bits(static_cast<int>(std::max<std::int64_t>(first - group * 64, 0)),
                               static_cast<int>(std::min<std::int64_t>(last - group * 64, 64)));
      sum += std::popcount(wanted & ~cover[group]);
    }
  }
  return alike ? sum * static_cast<double>(rows) : sum;
}

}  // namespace

double AttentionPattern::pairs_per_head() const {
  if (pairs >= 0) return pairs;
  pairs_of_head.assign(static_cast<std::size_t>(index_heads), 0.0);
  for (int h = 0; h < index_heads; ++h) {
    double& sum = pairs_of_head[static_cast<std::size_t>(h)];
    for (std::int64_t b = 0; b < q_blocks(); ++b) {
      const std::int64_t list = h * q_blocks() + b;
      for (std::int64_t r = run_offset[list]; r < run_offset[list + 1]; ++r)
        sum += run_pairs(*this, b, runs[r]);
      if (has_columns()) sum += column_pairs(*this, h, b);
    }
  }
  return pairs = std::accumulate(pairs_of_head.begin(), pairs_of_head.end(), 0.0) / index_heads;
}

double AttentionPattern::head_pairs(int head) const {
  const double mean = pairs_per_head();
  return pairs_of_head.empty() ? mean : pairs_of_head.at(static_cast<std::size_t>(head));
}

double AttentionPattern::visible_pairs() const {
  double sum = 0;
  for (std::int64_t i = 0; i < q_tokens; ++i) sum += static_cast<double>(key_end[i] - key_begin[i]);
  return sum;
}

AttentionPattern dense_pattern(const std::vector<AxisToken>& queries,
                               const std::vector<AxisToken>& keys) {
  constexpr auto limit = static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max());
  require(queries.size() <= limit && keys.size() <= limit,
          "attention over {} queries and {} keys: at most {} of each in one call", queries.size(),
          keys.size(), limit);
  AttentionPattern index;
  index.q_tokens = static_cast<std::int64_t>(queries.size());
  index.k_tokens = static_cast<std::int64_t>(keys.size());

  struct Range {
    std::int32_t begin = 0, end = 0;
    std::int32_t seen = 0;  ///< keys below the latest query's position: moves forward only
    std::int64_t latest = 0;
  };
  std::unordered_map<std::int32_t, Range> range_of;
  for (std::int32_t j = 0; j < index.k_tokens; ++j) {
    if (keys[j].segment < 0) continue;  // padding ends its segment's keys
    if (j > 0 && keys[j].segment == keys[j - 1].segment) {
      require(keys[j].position > keys[j - 1].position,
              "attention index: key {} of segment {} does not ascend in position", j,
              keys[j].segment);
    } else {
      const bool fresh = range_of
                             .try_emplace(keys[j].segment,
                                          Range{j, j, j, std::numeric_limits<std::int64_t>::min()})
                             .second;
      require(fresh, "attention index: keys of segment {} are not adjacent (key {})",
              keys[j].segment, j);
    }
    range_of[keys[j].segment].end = j + 1;
  }

  index.key_begin.resize(index.q_tokens);
  index.key_end.resize(index.q_tokens);
  std::int32_t begin = 0, end = 0;  // of the row before: a row of a segment without keys repeats
                                    // `end`, so that bounds never decrease
  for (std::int64_t i = 0; i < index.q_tokens; ++i) {
    const auto found = range_of.find(queries[i].segment);
    std::int32_t first = end, last = end;
    if (found != range_of.end()) {
      Range& range = found->second;
      require(queries[i].position >= range.latest,
              "attention index: query {} of segment {} does not ascend in position", i,
              queries[i].segment);
      range.latest = queries[i].position;
      while (range.seen < range.end && keys[range.seen].position <= queries[i].position)
        ++range.seen;
      first = range.begin;
      last = range.seen;
    }
    require(first >= begin && last >= end,
            "attention index: segment {} (query {}) comes in another order among the keys than "
            "among the queries",
            queries[i].segment, i);
    index.key_begin[i] = begin = first;
    index.key_end[i] = end = last;
  }

  index.run_offset.push_back(0);
  for (std::int64_t b = 0; b < index.q_blocks(); ++b) {
    std::int32_t low = 0, high = 0;
    for (std::int64_t i = b * kBlock; i < std::min((b + 1) * kBlock, index.q_tokens); ++i) {
      if (index.key_begin[i] == index.key_end[i]) continue;
      if (high == 0) low = index.key_begin[i];
      high = index.key_end[i];
    }
    if (high > 0) index.runs.push_back({low / kBlock, (high + kBlock - 1) / kBlock, -1});
    index.run_offset.push_back(static_cast<std::int64_t>(index.runs.size()));
  }
  return index;
}

namespace {
/// Cover words of every (index head, query block), as cover_columns defines them.
void compute_cover(const AttentionPattern& index, std::vector<std::int64_t>& offset,
                   std::vector<std::uint64_t>& cover) {
  offset.assign(1, 0);
  cover.clear();
  for (int h = 0; h < index.index_heads; ++h) {
    for (std::int64_t b = 0; b < index.q_blocks(); ++b) {
      const std::int64_t list = std::int64_t{h} * index.segments + index.block_segment[b];
      const std::int64_t first = index.column_offset[list],
                         count = index.column_offset[list + 1] - first;
      const std::size_t base = cover.size();
      cover.resize(base + (count + 63) / 64, 0);
      std::int64_t run = index.run_offset[h * index.q_blocks() + b];
      const std::int64_t runs_end = index.run_offset[h * index.q_blocks() + b + 1];
      for (std::int64_t j = 0; j < count; ++j) {  // columns and runs both ascend
        const std::int32_t block = index.columns[first + j] / kBlock;
        while (run < runs_end && index.runs[run].last <= block) ++run;
        if (run < runs_end && index.runs[run].first <= block)
          cover[base + j / 64] |= std::uint64_t{1} << (j % 64);
      }
      offset.push_back(static_cast<std::int64_t>(cover.size()));
    }
  }
}
}  // namespace

void cover_columns(AttentionPattern& index) {
  index.cover_offset.clear();
  index.cover.clear();
  if (index.column_offset.empty()) return;
  require(index.row_masks.empty(), "attention index: columns and row masks exclude each other");
  compute_cover(index, index.cover_offset, index.cover);
}

TransposedIndex transpose(const AttentionPattern& index) {
  const std::int64_t q_blocks = index.q_blocks(), k_blocks = index.k_blocks();
  TransposedIndex result;
  result.offset.assign(index.index_heads * k_blocks + 1, 0);
  const auto for_each = [&](auto&& visit) {
    for (std::int64_t h = 0; h < index.index_heads; ++h)
      for (std::int64_t b = 0; b < q_blocks; ++b)
        for (std::int64_t r = index.run_offset[h * q_blocks + b];
             r < index.run_offset[h * q_blocks + b + 1]; ++r)
          for (std::int64_t k = index.runs[r].first; k < index.runs[r].last; ++k)
            visit(h * k_blocks + k, b, index.runs[r].row_mask);
  };
  for_each([&](std::int64_t list, std::int64_t, std::int32_t) { ++result.offset[list + 1]; });
  for (std::size_t i = 1; i < result.offset.size(); ++i) result.offset[i] += result.offset[i - 1];
  result.query_block.resize(result.offset.back());
  result.row_mask.resize(result.offset.back());
  std::vector<std::int64_t> next(result.offset.begin(), result.offset.end() - 1);
  for_each([&](std::int64_t list, std::int64_t b, std::int32_t mask) {
    result.query_block[next[list]] = static_cast<std::int32_t>(b);
    result.row_mask[next[list]++] = mask;
  });
  return result;
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

std::string row_problems(const AttentionPattern& index) {
  if (index.q_tokens < 0 || index.k_tokens < 0)
    return fmt::format("{} queries and {} keys", index.q_tokens, index.k_tokens);
  if (static_cast<std::int64_t>(index.key_begin.size()) != index.q_tokens ||
      static_cast<std::int64_t>(index.key_end.size()) != index.q_tokens)
    return fmt::format("key_begin and key_end have {} and {} entries for {} queries",
                       index.key_begin.size(), index.key_end.size(), index.q_tokens);
  for (std::int64_t i = 0; i < index.q_tokens; ++i) {
    const std::int32_t begin = index.key_begin[i], end = index.key_end[i];
    if (begin < 0 || end < begin || end > index.k_tokens)
      return fmt::format("query {} sees keys [{}, {}) of {}", i, begin, end, index.k_tokens);
    if (i > 0 && (begin < index.key_begin[i - 1] || end < index.key_end[i - 1]))
      return fmt::format("query {} sees keys [{}, {}), before those of query {}", i, begin, end,
                         i - 1);
  }
  return "";
}

std::string run_problems(const AttentionPattern& index) {
  if (index.index_heads < 1) return fmt::format("index_heads = {}", index.index_heads);
  const std::int64_t lists = index.index_heads * index.q_blocks();
  if (auto text = offset_problems("run_offset", index.run_offset, lists, index.runs.size());
      !text.empty())
    return text;
  for (std::int64_t list = 0; list < lists; ++list) {
    std::int32_t row_end[kBlock] =
        {};  // per row of the block, the first key block that no run has covered yet
    for (std::int64_t r = index.run_offset[list]; r < index.run_offset[list + 1]; ++r) {
      const BlockRun& run = index.runs[r];
      const auto place = [&] {
        return fmt::format("run {} [{}, {}) of index head {}, query block {}", r, run.first,
                           run.last, list / index.q_blocks(), list % index.q_blocks());
      };
      if (run.first < 0 || run.last <= run.first || run.last > index.k_blocks())
        return fmt::format("{} lies outside the {} key blocks or is empty", place(),
                           index.k_blocks());
      if (run.row_mask < -1 || run.row_mask >= static_cast<std::int64_t>(index.row_masks.size()))
        return fmt::format("{} names row mask {} of {}", place(), run.row_mask,
                           index.row_masks.size());
      if (r > index.run_offset[list] && run.first < index.runs[r - 1].first)
        return fmt::format("{} is out of order", place());
      const std::uint64_t rows = rows_of(index, run);
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

std::string column_problems(const AttentionPattern& index) {
  if (index.column_offset.empty())
    return index.columns.empty() ? "" : "columns without column_offset";
  if (!index.row_masks.empty()) return "columns and row masks exclude each other";
  if (index.segments < 1) return fmt::format("segments = {}", index.segments);
  if (auto text =
          offset_problems("column_offset", index.column_offset,
                          std::int64_t{index.index_heads} * index.segments, index.columns.size());
      !text.empty())
    return text;
  if (static_cast<std::int64_t>(index.block_segment.size()) != index.q_blocks())
    return fmt::format("block_segment has {} entries for {} query blocks",
                       index.block_segment.size(), index.q_blocks());
  for (std::int32_t segment : index.block_segment)
    if (segment < 0 || segment >= index.segments)
      return fmt::format("block_segment names segment {} of {}", segment, index.segments);
  for (std::size_t list = 0; list + 1 < index.column_offset.size(); ++list) {
    for (std::int64_t j = index.column_offset[list]; j < index.column_offset[list + 1]; ++j) {
      if (index.columns[j] < 0 || index.columns[j] >= index.k_tokens)
        return fmt::format("column {} is key {} of {}", j, index.columns[j], index.k_tokens);
      if (j > index.column_offset[list] && index.columns[j] <= index.columns[j - 1])
        return fmt::format("column {} (key {}) does not ascend", j, index.columns[j]);
    }
  }
  std::vector<std::int64_t> offset;
  std::vector<std::uint64_t> cover;
  compute_cover(index, offset, cover);
  if (offset != index.cover_offset || cover != index.cover)
    return "cover words do not fit runs and columns; call cover_columns() after both are set";
  return "";
}

}  // namespace

std::string problems(const AttentionPattern& index) {
  for (auto* check : {row_problems, run_problems, column_problems})
    if (auto text = check(index); !text.empty()) return "attention index: " + text;
  return "";
}

}  // namespace ballast
