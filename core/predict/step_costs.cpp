#include "core/predict/step_costs.hpp"

#include <memory>

namespace ballast {

ScheduleCosts schedule_costs(const StepPlan& plan, const SimulationOptions& options,
                             const Costs& costs) {
  SimulationOptions untuned = options;
  untuned.tune = false;
  MicroBatchClock clock(plan, untuned, costs);
  std::vector<std::shared_ptr<const MicroBatchTimes>> times;
  for (std::size_t id = 0; id < plan.micro_batches.size(); ++id)
    times.push_back(clock.times(static_cast<int>(id)));
  return {[times = std::move(times)](int stage, const Op& op) {
    const MicroBatchTimes& t = *times.at(static_cast<std::size_t>(op.micro_batch));
    const auto s = static_cast<std::size_t>(stage);
    switch (op.kind) {
      case OpKind::forward:
      case OpKind::recompute:
        return t.forward[s].total_s();
      case OpKind::backward:
        return t.backward[s].total_s();
      case OpKind::backward_input:
        return t.backward[s].total_s() - t.weight_s[s];
      case OpKind::backward_weight:
        return t.weight_s[s];
      case OpKind::send:
        return t.stage_hop_s(stage, op.peer);
      default:
        return 0.0;
    }
  }};
}

std::vector<TuningTarget> tuning_targets(const StepPlan& plan, const SimulationOptions& options,
                                         const Costs& costs) {
  const DstOptions& dst = options.dst;
  const auto mode = [&](const PlannedMicroBatch& m) {
    return options.recompute.with(m.recompute_layers).of(0);
  };
  // A micro-batch without tokens chooses nothing, and no anchor counts it.
  std::vector<std::size_t> ids;
  std::vector<double> latencies;
  for (std::size_t id = 0; id < plan.micro_batches.size(); ++id) {
    const PlannedMicroBatch& m = plan.micro_batches[id];
    if (m.micro_batch().tokens() == 0) continue;
    ids.push_back(id);
    latencies.push_back(
        layer_time(costs, m.micro_batch(), dst.base_budget, m.split, mode(m)).total_s());
  }
  std::vector<TuningTarget> targets(plan.micro_batches.size(),
                                    {dst.base_budget, dst.base_budget, false});
  if (latencies.empty()) return targets;
  const double anchor_s = anchor_latency(dst.anchor, latencies);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const PlannedMicroBatch& m = plan.micro_batches[ids[i]];
    targets[ids[i]] = tuning_target(latencies[i], anchor_s, dst, [&] {
      return align_budget(costs, m.micro_batch(), anchor_s, dst.candidates, m.split, mode(m));
    });
  }
  return targets;
}

}  // namespace ballast
