#include "core/predict/costs.hpp"

#include <algorithm>

#include "core/base/error.hpp"

namespace ballast {

PassTime layer_time(const Costs& costs, const MicroBatch& micro_batch, std::int64_t budget,
                    const ContextSplit& split, Recompute mode) {
  PassTime time = costs.rest(micro_batch.axis_tokens(), split, mode);
  for (const Segment& s : micro_batch.segments)
    time += costs.attention(s.tokens(), s.begin, budget, split, mode);
  return time;
}

double computed_keys(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                     std::int64_t block_tokens, const PatternWork* pattern) {
  const double keys = mean_keys(query_tokens, prefix_tokens, budget, block_tokens);
  return budget == 0 && pattern ? keys * pattern->density(prefix_tokens + query_tokens) : keys;
}

double sample_seconds(const Costs& costs, std::int64_t tokens, double budget,
                      const ContextSplit& split, Recompute mode) {
  return layer_time(costs, {{{0, 0, tokens, 0}}}, std::llround(budget), split, mode).total_s();
}

std::int64_t align_budget(const Costs& costs, const MicroBatch& micro_batch, double target_s,
                          std::span<const std::int64_t> candidates, const ContextSplit& split,
                          Recompute mode) {
  require(!candidates.empty() && std::is_sorted(candidates.begin(), candidates.end()) &&
              candidates.front() > 0,
          "candidate budgets must be above 0 and ascend");
  // Times never fall with the budget, so the budgets within the target come first.
  const auto above =
      std::partition_point(candidates.begin(), candidates.end(), [&](std::int64_t k) {
        return layer_time(costs, micro_batch, k, split, mode).total_s() <= target_s;
      });
  return above == candidates.begin() ? candidates.front() : *(above - 1);
}

}  // namespace ballast
