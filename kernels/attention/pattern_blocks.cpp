#include "kernels/attention/pattern_blocks.hpp"

#include <algorithm>

#include "core/plan/attention/block_budget.hpp"

namespace ballast {

PatternBlocks::PatternBlocks(const KeyAxis& axis, std::int64_t tokens)
    : block_tokens(tokens), first{0} {
  for (int s = 0; s < axis.segments(); ++s)
    first.push_back(first.back() + blocks_of_keys(axis.offset[s + 1] - axis.offset[s], tokens));
}

std::int64_t PatternBlocks::widest() const {
  std::int64_t most = 1;
  for (std::size_t s = 0; s + 1 < first.size(); ++s) most = std::max(most, first[s + 1] - first[s]);
  return most;
}

std::vector<std::int32_t> PatternBlocks::keys(const KeyAxis& axis) const {
  std::vector<std::int32_t> keys;
  for (int s = 0; s < axis.segments(); ++s)
    for (std::int64_t j = 0; j < first[s + 1] - first[s]; ++j)
      keys.push_back(static_cast<std::int32_t>(
          std::clamp<std::int64_t>(axis.count[s] - j * block_tokens, 0, block_tokens)));
  return keys;
}

PatternRows PatternBlocks::rows(const KeyAxis& axis, std::span<const AxisRange> tokens) const {
  PatternRows at;
  for (const QueryBlock& block : query_blocks(tokens, axis)) {
    at.first.push_back(static_cast<std::int32_t>(first[block.segment]));
    at.own.push_back(at.first.back() +
                     static_cast<std::int32_t>(block.block * kBlock / block_tokens));
    at.rows.push_back(block.tokens);
  }
  return at;
}

}  // namespace ballast
