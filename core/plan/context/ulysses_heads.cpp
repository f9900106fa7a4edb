#include "core/plan/context/ulysses_heads.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ballast {

std::string head_split_problem(std::int64_t query_heads, int ranks) {
  if (ranks >= 1 && query_heads % ranks == 0) return "";
  return fmt::format(
      "{} query heads cannot be shared by {} sequence-parallel ranks: {} = {} x {} + {}; choose a "
      "divisor of {}",
      query_heads, ranks, query_heads, query_heads / std::max(1, ranks), ranks,
      query_heads % std::max(1, ranks), query_heads);
}

}  // namespace ballast
