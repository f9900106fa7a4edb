// One token of a packed axis as layouts and attention see it, and the block that both cut axes
// into.
#pragma once
#include <cstdint>

namespace ballast {

/// Tokens in a query block and in a key block of every index.
inline constexpr int kBlock = 64;

/// Visible interval of every query row, given the tokens of the two axes as (segment, position).
/// Key tokens of one segment must be adjacent and ascend in position.  Returned through
/// key_begin/key_end of a dense index.
struct AxisToken {
  std::int32_t segment = 0;  ///< -1: padding, which sees nothing and is seen by nothing
  std::int64_t position =
      0;  ///< position inside the sample, so that a dependent chunk starts at begin > 0
};

}  // namespace ballast
