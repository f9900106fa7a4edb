// Arithmetic of coverage curves (BudgetPolicy), the same on host and GPU: sums in fixed point,
// routing logits in steps.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// How many of positions [begin, end) are among the first `told` of every 64.
constexpr std::int64_t count_told(std::int64_t begin, std::int64_t end, int told) {
  const auto before = [told](std::int64_t position) {
    return position / kBlock * told + std::min<std::int64_t>(position % kBlock, told);
  };
  return before(end) - before(begin);
}

/// Unit of coverage sums, which run over all queries and heads; room for 2^34 of them.
inline constexpr double kCoverageUnit = 268435456.0;  // 2^28

/// Routing logits are held for coverage as steps of 1/32 below the highest of their query, so that
/// sums over them have no order.  A logit too far below to weigh anything takes the last step.
inline constexpr int kLogitSteps = 512;
inline constexpr float kLogitStepsPerUnit = 32;
inline int logit_step(float highest, float logit) {
  return static_cast<int>(std::lrint(
      std::min((highest - logit) * kLogitStepsPerUnit, static_cast<float>(kLogitSteps - 1))));
}
/// [kLogitSteps] exp(-step / 32) in units of 2^-20; the last is 0.
inline const std::vector<std::uint32_t>& logit_weights() {
  static const std::vector<std::uint32_t> weights = [] {
    std::vector<std::uint32_t> made;
    for (int step = 0; step < kLogitSteps; ++step)
      made.push_back(static_cast<std::uint32_t>(
          std::lrint(std::exp(-step / double{kLogitStepsPerUnit}) * 1048576.0)));
    return made;
  }();
  return weights;
}

}  // namespace ballast
