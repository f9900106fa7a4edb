// Indexes for the standalone attention benchmark, built straight from the contract in
// core/plan/attention/attention_pattern.hpp, and the brute-force list of pairs that such an index
// computes.  Host only.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace bench {
using ballast::BlockRun;
using ballast::kBlock;
using ballast::PatternArrays;

/// Dense index over packed segments (lengths), seen by the last `q_tokens` of the axis.
inline PatternArrays packed_index(const std::vector<int>& lengths, std::int64_t q_tokens) {
  PatternArrays x;
  for (int n : lengths) x.k_tokens += n;
  std::int64_t begin = 0;
  for (int n : lengths) {
    for (std::int64_t i = begin; i < begin + n; ++i) {
      if (i < x.k_tokens - q_tokens) continue;
      x.visible.add(1, begin, i + 1, 1);
    }
    begin += n;
  }
  return x;
}
/// Fills the runs of a dense index.
inline void dense_runs(PatternArrays& x) {
  x.run_offset = {0};
  for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
    const std::int64_t last = std::min<std::int64_t>((b + 1) * kBlock, x.q_tokens()) - 1;
    const int low = x.visible.row(b * kBlock).begin / kBlock,
              high = (x.visible.row(last).end + kBlock - 1) / kBlock;
    if (low < high) x.runs.push_back({low, high, -1});
    x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
  }
}
inline PatternArrays dense(const std::vector<int>& lengths, std::int64_t q_tokens) {
  PatternArrays x = packed_index(lengths, q_tokens);
  dense_runs(x);
  return x;
}

/// Appends a sorted set of blocks as runs.
inline void append_blocks(PatternArrays& x, const std::set<int>& blocks) {
  for (int b : blocks) {
    if (!x.runs.empty() && static_cast<std::int64_t>(x.runs.size()) > x.run_offset.back() &&
        x.runs.back().last == b) {
      x.runs.back().last = b + 1;
    } else {
      x.runs.push_back({b, b + 1, -1});
    }
  }
  x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
}
/// Lists chosen by `pick(index head, query block, first visible key block, one past the last)`.
inline void list_runs(PatternArrays& x, int index_heads,
                      const std::function<std::set<int>(int, int, int, int)>& pick) {
  x.index_heads = index_heads;
  x.run_offset = {0};
  x.runs.clear();
  for (int h = 0; h < index_heads; ++h) {
    for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
      const std::int64_t last = std::min<std::int64_t>((b + 1) * kBlock, x.q_tokens()) - 1;
      append_blocks(x, pick(h, static_cast<int>(b), x.visible.row(b * kBlock).begin / kBlock,
                            (x.visible.row(last).end + kBlock - 1) / kBlock));
    }
  }
}
/// Random columns: `count` columns a segment and head, of `starts` (segment starts on the key axis,
/// multiples of 64, then the end).
inline void add_columns(PatternArrays& x, const std::vector<int>& starts, int count,
                        std::mt19937& rng) {
  x.segments = static_cast<int>(starts.size()) - 1;
  x.block_segment.clear();
  for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
    const int key = x.visible.row(b * kBlock).begin;
    x.block_segment.push_back(
        static_cast<int>(std::upper_bound(starts.begin(), starts.end() - 1, key) - starts.begin()) -
        1);
  }
  x.column_offset = {0};
  for (int h = 0; h < x.index_heads; ++h) {
    for (int s = 0; s < x.segments; ++s) {
      std::set<int> chosen;
      const int n = std::min(count, starts[s + 1] - starts[s]);
      while (static_cast<int>(chosen.size()) < n)
        chosen.insert(starts[s] + static_cast<int>(rng() % (starts[s + 1] - starts[s])));
      x.columns.insert(x.columns.end(), chosen.begin(), chosen.end());
      x.column_offset.push_back(static_cast<std::int64_t>(x.columns.size()));
    }
  }
  x.cover_offset.clear();
  for (int h = 0; h < x.index_heads; ++h) {
    for (std::int64_t b = 0; b < x.q_blocks(); ++b) {
      x.cover_offset.push_back(static_cast<std::int64_t>(x.cover.size()));
      const std::int64_t list = h * x.segments + x.block_segment[b], runs = h * x.q_blocks() + b;
      std::int64_t r = x.run_offset[runs];
      for (std::int64_t i = x.column_offset[list]; i < x.column_offset[list + 1]; ++i) {
        const int slot = static_cast<int>(i - x.column_offset[list]), block = x.columns[i] / kBlock;
        if (slot % 64 == 0) x.cover.push_back(0);
        while (r < x.run_offset[runs + 1] && x.runs[r].last <= block) ++r;
        if (r < x.run_offset[runs + 1] && x.runs[r].first <= block)
          x.cover.back() |= 1ull << (slot % 64);
      }
    }
  }
  x.cover_offset.push_back(static_cast<std::int64_t>(x.cover.size()));
}
/// Splits every run into two runs of the same blocks whose row masks are disjoint, or leaves some
/// rows out.
inline void add_row_masks(PatternArrays& x, std::mt19937_64& rng) {
  std::vector<BlockRun> runs;
  std::vector<std::int64_t> offset = {0};
  for (std::size_t list = 0; list + 1 < x.run_offset.size(); ++list) {
    for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
      const BlockRun run = x.runs[r];
      if (rng() % 3 == 0) {
        runs.push_back(run);
        continue;
      }
      const std::uint64_t mask = rng();
      x.row_masks.push_back(mask);
      runs.push_back({run.first, run.last, static_cast<int>(x.row_masks.size()) - 1});
      if (rng() % 2 == 0 && run.last - run.first == 1) {
        x.row_masks.push_back(~mask);
        runs.push_back({run.first, run.last, static_cast<int>(x.row_masks.size()) - 1});
      }
    }
    offset.push_back(static_cast<std::int64_t>(runs.size()));
  }
  x.runs = runs;
  x.run_offset = offset;
}

/// allowed[(h * q_tokens + q) * k_tokens + k], by the definition, pair by pair.
inline std::vector<std::uint8_t> allowed_pairs(const PatternArrays& x) {
  std::vector<std::uint8_t> allowed(
      static_cast<std::size_t>(x.index_heads * x.q_tokens() * x.k_tokens), 0);
  for (int h = 0; h < x.index_heads; ++h) {
    for (std::int64_t q = 0; q < x.q_tokens(); ++q) {
      const std::int64_t list = h * x.q_blocks() + q / kBlock;
      std::uint8_t* row = allowed.data() + (h * x.q_tokens() + q) * x.k_tokens;
      const auto visible = [&](std::int64_t k) {
        return k >= x.visible.row(q).begin && k < x.visible.row(q).end;
      };
      std::vector<std::uint8_t> covered(static_cast<std::size_t>(x.k_blocks()), 0);
      for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
        const BlockRun& run = x.runs[r];
        for (int b = run.first; b < run.last; ++b) covered[b] = 1;
        if (run.row_mask >= 0 && !(x.row_masks[run.row_mask] >> (q % kBlock) & 1)) continue;
        for (std::int64_t k = run.first * kBlock;
             k < std::min<std::int64_t>(run.last * kBlock, x.k_tokens); ++k)
          row[k] |= visible(k);
      }
      if (!x.has_columns()) continue;
      const std::int64_t columns = h * x.segments + x.block_segment[q / kBlock];
      for (std::int64_t i = x.column_offset[columns]; i < x.column_offset[columns + 1]; ++i) {
        if (!covered[x.columns[i] / kBlock]) row[x.columns[i]] |= visible(x.columns[i]);
      }
    }
  }
  return allowed;
}

/// Pairs a head computes, for indexes without row masks.
inline double pairs_per_head(const PatternArrays& x) {
  double total = 0;
  for (int h = 0; h < x.index_heads; ++h) {
    for (std::int64_t q = 0; q < x.q_tokens(); ++q) {
      const std::int64_t list = h * x.q_blocks() + q / kBlock, begin = x.visible.row(q).begin,
                         end = x.visible.row(q).end;
      for (std::int64_t r = x.run_offset[list]; r < x.run_offset[list + 1]; ++r) {
        total +=
            std::max<std::int64_t>(0, std::min<std::int64_t>(end, x.runs[r].last * kBlock) -
                                          std::max<std::int64_t>(begin, x.runs[r].first * kBlock));
      }
      if (!x.has_columns()) continue;
      const std::int64_t columns = h * x.segments + x.block_segment[q / kBlock],
                         n = x.column_offset[columns + 1] - x.column_offset[columns];
      for (std::int64_t i = 0; i < n; ++i) {
        const int key = x.columns[x.column_offset[columns] + i];
        if (key >= end) break;
        total += key >= begin && !(x.cover[x.cover_offset[list] + i / 64] >> (i % 64) & 1);
      }
    }
  }
  return total / x.index_heads;
}

}  // namespace bench
