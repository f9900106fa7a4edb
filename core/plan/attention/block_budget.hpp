// When a budget of key blocks is attention to everything: the one rule of sources of patterns, of
// kernels and of the clock.
#pragma once
#include <cstdint>
#include <limits>

#include "core/base/division.hpp"

namespace ballast {

/// Blocks of `block_tokens` that hold `keys`.
constexpr std::int64_t blocks_of_keys(std::int64_t keys, std::int64_t block_tokens) {
  return divided_up(keys, block_tokens);
}

/// Keys of the longest segment whose queries all choose everything when each chooses `budget`
/// blocks; budget 0: of any.
constexpr std::int64_t keys_taken(std::int64_t budget, std::int64_t block_tokens) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  return budget == 0 || budget > most / block_tokens ? most : budget * block_tokens;
}

/// Whether queries that choose `budget` blocks choose all `keys` of their segment, stored ones
/// included: attention is dense then.
constexpr bool budget_takes_all(std::int64_t budget, std::int64_t block_tokens, std::int64_t keys) {
  return keys <= keys_taken(budget, block_tokens);
}

/// Blocks that a row lists besides its own, where `before` lie before it and it chooses `most` of
/// them: none where it chooses all, which dense attention to its whole prefix computes.
constexpr int listed_blocks(int before, int most) { return before > most ? most : 0; }

}  // namespace ballast
