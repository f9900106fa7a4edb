// Plans of lists of micro-batches, and costs of whole seconds, for tests of the clock.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/stated_costs.hpp"

namespace ballast {

inline MicroBatch packed(std::vector<std::int64_t> lengths) {
  MicroBatch m;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    m.segments.push_back({static_cast<std::int64_t>(i), 0, lengths[i], 0});
  return m;
}

/// Lists of independent data-parallel ranks as a plan.
inline StepPlan plan_of(const std::vector<std::vector<MicroBatch>>& lists,
                        const PipelineOptions& pipeline, std::int64_t layers,
                        ContextSplit split = {}) {
  StepPlan plan;
  plan.mesh.dp = static_cast<int>(lists.size());
  plan.mesh.pp = pipeline.stages;
  plan.mesh.sp = split.sp, plan.mesh.cp_outer = split.ring_outer,
  plan.mesh.cp_inner = split.ring_inner;
  plan.layouts.push_back({LayoutKind::zigzag, 64, 1});
  plan.layer_begin = balance_stages(layers, pipeline.stages, {});
  for (std::size_t d = 0; d < lists.size(); ++d) {
    PlannedLane& lane = plan.lanes.emplace_back();
    for (const MicroBatch& m : lists[d]) {
      PlannedMicroBatch& planned = plan.micro_batches.emplace_back();
      planned.segments = m.segments;
      planned.group = {static_cast<int>(d), 1};
      planned.split = split;
      lane.micro_batches.push_back(static_cast<int>(plan.micro_batches.size()) - 1);
    }
    lane.schedule = static_cast<int>(d);
    plan.schedules.push_back(plan_schedule(lists[d], pipeline));
  }
  return plan;
}

/// One forward of a token takes 1, its backward 2, on each stage.
inline StatedCosts unit_costs(double hop = 0) {
  StatedTimes times;
  times.token_s = 1, times.stage_hop_token_s = hop;
  return StatedCosts(times);
}

inline PipelineOptions pipeline_of(ScheduleKind schedule, int stages, int k = 1) {
  PipelineOptions options;
  options.schedule = schedule, options.stages = stages, options.k = k;
  options.costs.token_s = 1;
  return options;
}

inline std::vector<MicroBatch> of_lengths(const std::vector<std::int64_t>& lengths) {
  std::vector<MicroBatch> list;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    list.push_back({{{static_cast<std::int64_t>(i), 0, lengths[i], 0}}});
  return list;
}

/// A ring whose hops take 3 and whose step of attention takes 2: what is exposed is the difference.
class RingTimes final : public Costs {
 public:
  std::string source() const override { return "test"; }
  PassTime rest(std::int64_t, const ContextSplit&, Recompute) const override {
    return {5, 10, 4, 0};
  }
  PassTime head(std::int64_t, const ContextSplit&) const override { return {1, 2, 0, 0}; }
  PassTime attention(std::int64_t, std::int64_t, std::int64_t, const ContextSplit&,
                     Recompute) const override {
    return {8, 16, 0, 0};
  }
  double exchange(std::int64_t, const ContextSplit& split, Link) const override {
    return split.sp > 1 ? 0.5 : 0;
  }
  double ring_hop(std::int64_t, const ContextSplit&, RingLevel, bool, Link) const override {
    return 3;
  }
  double ring_sums(std::int64_t, const ContextSplit&, bool gradients) const override {
    return gradients ? 0.75 : 0.25;
  }
  double stage_hop(std::int64_t, const ContextSplit&, Link) const override { return 0; }
  double host_copy(std::int64_t, const ContextSplit&) const override { return 2; }
  double reduce(const Collective& sum) const override {
    return sum.elements > 1 ? (sum.full ? 9 : 7) : 0;
  }
  double gather(const Collective&) const override { return 11; }
  double optimizer(std::int64_t elements, bool) const override {
    return static_cast<double>(elements);
  }
};

}  // namespace ballast
