#include "core/plan/attention/budgeted_pattern.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

AttentionAxes budget_axes(const std::vector<BudgetSegment>& segments) {
  AttentionAxes axes;
  axes.align = kBlock;
  AxisRanges keys;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const auto& [n, prefix] = segments[s];
    require(n > 0 && prefix >= 0, "budget index: {} tokens after {}", n, prefix);
    const auto segment = static_cast<std::int32_t>(s);
    axes.first_query.push_back(prefix);
    axes.queries.push_back({segment, prefix, n});
    keys.push_back({segment, 0, prefix + n});
  }
  axes.keys = {keys};
  return axes;
}

AttentionPattern budgeted_pattern(const std::vector<BudgetSegment>& segments, std::int64_t budget,
                                  std::int64_t block_tokens, int heads, std::uint64_t seed) {
  require(block_tokens > 0 && block_tokens % kBlock == 0 && budget >= 0 && heads >= 1,
          "budget index: blocks of {} tokens must be multiples of {}, budget {} and heads {} not "
          "negative",
          block_tokens, kBlock, budget, heads);
  const AttentionAxes axes = budget_axes(segments);
  for (const auto& [n, prefix] : segments)
    require(budget == 0 || (n % kBlock == 0 && prefix % kBlock == 0),
            "budget index: {} tokens after {} are no multiples of {}", n, prefix, kBlock);
  const AttentionPattern dense = dense_pattern(axes.queries, axes.keys[0]);
  if (budget == 0) return dense;
  PatternArrays x;
  x.visible = dense.arrays().visible;
  x.k_tokens = dense.k_tokens();
  const std::int64_t blocks = x.q_blocks(), wide = block_tokens / kBlock;
  x.index_heads = heads;
  x.run_offset.assign(1, 0);
  std::vector<std::int32_t> order;
  for (int h = 0; h < heads; ++h)
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t row = b * kBlock;
      const auto start = static_cast<std::int32_t>(x.visible.row(row).begin / kBlock);
      const auto end = static_cast<std::int32_t>(
          (x.visible.row(row + kBlock - 1).end + kBlock - 1) / kBlock);  // beyond the own 64 keys
      const auto own = static_cast<std::int32_t>((end - 1 - start) / wide);  // pattern block
      order.resize(own);
      std::iota(order.begin(), order.end(), 0);
      const auto others = static_cast<std::int32_t>(std::min<std::int64_t>(budget - 1, own));
      for (std::int32_t i = 0; i < others && others < own; ++i) {
        const std::uint64_t at =
            (static_cast<std::uint64_t>(h) * static_cast<std::uint64_t>(blocks) +
             static_cast<std::uint64_t>(b))
                << 16 |
            static_cast<std::uint64_t>(i);
        std::swap(
            order[i],
            order[i + static_cast<std::int32_t>(random_bits(seed, stream_of("budget index"), at) %
                                                static_cast<std::uint64_t>(own - i))]);
      }
      order.resize(others);
      std::sort(order.begin(), order.end());
      order.push_back(own);
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto first = static_cast<std::int32_t>(start + order[i] * wide);
        const auto last = std::min(end, static_cast<std::int32_t>(first + wide));
        if (i > 0 && order[i] == order[i - 1] + 1)
          x.runs.back().last = last;
        else
          x.runs.push_back({first, last, -1});
      }
      x.run_offset.push_back(static_cast<std::int64_t>(x.runs.size()));
    }
  return AttentionPattern(std::move(x));
}

}  // namespace ballast
