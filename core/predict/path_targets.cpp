#include "core/predict/path_targets.hpp"

#include <algorithm>

#include "core/predict/simulate.hpp"

namespace ballast {

std::vector<TuningTarget> path_targets(StepPlan plan, SimulationOptions options,
                                       const Costs& costs) {
  options.tune = true;
  options.dst.threshold = 1;  // coverage is not known yet: budgets reach their targets
  options.keep_ops = false;
  options.memory.clear();
  struct Gain {
    std::size_t id = 0;
    std::int64_t most = 0;
  };
  std::vector<Gain> gains;
  for (std::size_t id = 0; id < plan.micro_batches.size(); ++id) {
    TuningTarget& target = plan.micro_batches[id].tuning;
    if (target.above_anchor || target.anchor_budget <= target.base_budget) continue;
    gains.push_back({id, target.anchor_budget});
    target.anchor_budget = target.base_budget;
  }
  // Those with the most room first.
  std::stable_sort(gains.begin(), gains.end(),
                   [](const Gain& a, const Gain& b) { return a.most > b.most; });
  const double least_s = gains.empty() ? 0 : simulate(plan, options, costs).step_s;
  for (const Gain& gain : gains) {
    TuningTarget& target = plan.micro_batches[gain.id].tuning;
    const auto first = std::upper_bound(options.dst.candidates.begin(),
                                        options.dst.candidates.end(), target.base_budget),
               last = std::upper_bound(first, options.dst.candidates.end(), gain.most);
    const auto felt = std::partition_point(first, last, [&](std::int64_t budget) {
      target.anchor_budget = budget;
      return simulate(plan, options, costs).step_s <= least_s * (1 + 1e-9);
    });
    target.anchor_budget = felt == first ? target.base_budget : *std::prev(felt);
  }
  std::vector<TuningTarget> targets;
  for (const PlannedMicroBatch& m : plan.micro_batches) targets.push_back(m.tuning);
  return targets;
}

}  // namespace ballast
