// Memory that reductions between host ranks take: what parallel/comm keeps to, and what
// core/predict counts.
#pragma once
#include <cstdint>

namespace ballast {

inline constexpr std::int64_t kReductionBytes = std::int64_t{32} << 20;  ///< receive space, at most
/// Gathered total up to which latency counts more than bytes: such tensors are gathered whole.
inline constexpr std::int64_t kGatheredBytes = std::int64_t{64} << 10;

}  // namespace ballast
