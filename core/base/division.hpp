#pragma once
#include <cstdint>

namespace ballast {

/// Parts of `by` that hold `n`.
constexpr std::int64_t divided_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

}  // namespace ballast
