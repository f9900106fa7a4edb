#include "core/plan/plan_step.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/base/error.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/step_order.hpp"

namespace ballast {
namespace {

PlannedMicroBatch planned(const MicroBatch& m, int dp, int round, const StepOptions& options) {
  PlannedMicroBatch result;
  result.segments = m.segments;
  result.group = {dp, m.sp};
  result.split =
      options.split ? options.split(m) : joined_split(options.mesh, m.sp, options.query_heads);
  result.round = round;
  result.recompute_layers = m.recompute_layers;
  result.align = m.align;
  return result;
}

/// Place of a rule in plan.layouts, which holds each once.
int layout_id(StepPlan& plan, const LayoutRule& rule) {
  const auto at = std::find(plan.layouts.begin(), plan.layouts.end(), rule);
  if (at == plan.layouts.end()) {
    plan.layouts.push_back(rule);
    return static_cast<int>(plan.layouts.size()) - 1;
  }
  return static_cast<int>(at - plan.layouts.begin());
}

/// Ids by place in the lists, then by rank.  Places that stand for another rank's micro-batch or
/// for none are left out.
void place(StepPlan& plan, const Batch& batch, const StepOptions& options) {
  std::size_t longest = 0;
  for (const auto& list : batch.micro_batches) longest = std::max(longest, list.size());
  for (std::size_t round = 0; round < longest; ++round)
    for (std::size_t d = 0; d < batch.micro_batches.size(); ++d) {
      if (round >= batch.micro_batches[d].size()) continue;
      const MicroBatch& m = batch.micro_batches[d][round];
      if (m.segments.empty()) continue;
      const int id = static_cast<int>(plan.micro_batches.size());
      plan.micro_batches.push_back(
          planned(m, static_cast<int>(d), static_cast<int>(round), options));
      PlannedMicroBatch& placed = plan.micro_batches.back();
      placed.layout = layout_id(plan, options.layout.of(m, placed.split.ring()));
      for (std::size_t other = d; other < d + static_cast<std::size_t>(m.sp); ++other)
        plan.lanes.at(other).micro_batches.push_back(id);
    }
}

void number_chunks(StepPlan& plan) {
  for (int d = 0; d < plan.mesh.dp; ++d) {
    const std::vector<int>& ids = plan.lanes[static_cast<std::size_t>(d)].micro_batches;
    for (const auto& group : chunk_groups(plan.list(d)))
      for (std::size_t c = 0; c < group.size(); ++c) {
        const int id = ids[static_cast<std::size_t>(group[c])];
        plan.micro_batches[static_cast<std::size_t>(id)].chunk = static_cast<int>(c);
      }
  }
}

std::vector<PlannedCollective> collectives(const StepPlan& plan, const StepOptions& options) {
  std::vector<PlannedCollective> list;
  const auto all = [&](CollectiveKind kind, int after_round) {
    for (int s = 0; s < plan.mesh.pp; ++s)
      list.push_back(
          {kind, s, after_round, options.stage_elements.at(static_cast<std::size_t>(s))});
  };
  if (plan.reduces_by_round()) {
    for (int r = 0; r < plan.rounds(); ++r) all(CollectiveKind::gradient_reduce, r);
  } else {
    all(CollectiveKind::gradient_reduce, -1);
  }
  if (options.tied_elements > 0 && plan.mesh.pp > 1)
    list.push_back({CollectiveKind::tied_sum, 0, -1, options.tied_elements});
  list.push_back({CollectiveKind::gradient_norm, 0, -1, 1});
  all(CollectiveKind::optimizer, -1);
  if (plan.zero > 0) all(CollectiveKind::parameter_gather, -1);
  return list;
}

/// All but schedules and collectives.
StepPlan lay_out(const Batch& batch, const StepOptions& options) {
  require(static_cast<int>(batch.micro_batches.size()) == options.mesh.dp,
          "a batch of {} lists for mesh.dp = {}", batch.micro_batches.size(), options.mesh.dp);
  StepPlan plan;
  plan.step = batch.step;
  plan.mesh = options.mesh;
  plan.zero = options.zero;
  plan.normaliser = options.normaliser;
  plan.loss_tokens = batch.loss_tokens();
  plan.layer_begin = options.layer_begin;
  plan.lanes.resize(batch.micro_batches.size());
  place(plan, batch, options);
  number_chunks(plan);
  const LossWeights weights(options.normaliser, batch);
  for (PlannedMicroBatch& m : plan.micro_batches) m.loss_weight = weights.of(m.micro_batch());
  return plan;
}

void order(StepPlan& plan, const StepOptions& options) {
  PipelineOptions pipeline = options.pipeline;
  pipeline.stages = options.mesh.pp;
  if (options.costs) {
    order_step(plan, pipeline, options.costs(plan));
    return;
  }
  std::vector<MicroBatch> list;
  for (const PlannedMicroBatch& m : plan.micro_batches) list.push_back(m.micro_batch());
  order_step(plan, pipeline, schedule_costs(pipeline.costs, list));
}

Batch batch_of(std::int64_t step, const std::vector<SampleLength>& samples,
               const StepOptions& options) {
  Batch batch = plan_batch(step, samples, options.batching);
  if (weighs_by_chunk(options.normaliser) && options.count_loss_tokens)
    options.count_loss_tokens(batch);
  return batch;
}

}  // namespace

StepPlan plan_batch_step(const Batch& batch, const StepOptions& options) {
  StepPlan plan = lay_out(batch, options);
  const auto tune = [&](const auto& targets_of) {
    if (!targets_of) return;
    const std::vector<TuningTarget> targets = targets_of(plan);
    require(targets.size() == plan.micro_batches.size(), "{} tuning targets for {} micro-batches",
            targets.size(), plan.micro_batches.size());
    for (std::size_t m = 0; m < targets.size(); ++m) plan.micro_batches[m].tuning = targets[m];
  };
  tune(options.tuning);
  order(plan, options);
  tune(options.retuning);
  plan.collectives = collectives(plan, options);
  return plan;
}

StepPlan plan_placement_step(std::int64_t step, const Placement& placed,
                             const std::vector<SampleLength>& samples, const StepOptions& options) {
  require(options.mesh.cp() == 1 && options.mesh.sp == 1,
          "a placement on ranks that a mesh of sp {} and cp {} joins already", options.mesh.sp,
          options.mesh.cp());
  // By first segment and ranks: a sample may come twice.
  std::map<std::tuple<std::int64_t, std::int64_t, int>, PlacementSplit> splits;
  for (const PlacedMicroBatch& m : placed.micro_batches)
    splits[{m.segments.front().sample, m.segments.front().begin, m.split.ranks}] = m.split;
  StepOptions split = options;
  split.split = [&splits](const MicroBatch& m) {
    const Segment& first = m.segments.front();
    const PlacementSplit& s = splits.at({first.sample, first.begin, m.sp});
    return context_split({}, s.sp, s.ring);
  };
  return plan_batch_step(plan_placed(step, placed, samples, options.batching), split);
}

StepPlan plan_step(std::int64_t step, const std::vector<SampleLength>& samples,
                   const StepOptions& options) {
  return plan_batch_step(batch_of(step, samples, options), options);
}

StepPlan plan_evaluation(const std::vector<SampleLength>& samples, const StepOptions& options) {
  StepPlan plan = lay_out(batch_of(-1, samples, options), options);
  plan.backward = false;
  order(plan, options);
  return plan;
}

}  // namespace ballast
