#include "core/plan/pipeline/pipeline_schedule.hpp"

#include <algorithm>
#include <set>

#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/schedule_lists.hpp"
#include "core/plan/pipeline/state_aware_schedule.hpp"

namespace ballast {

Schedule forward_schedule(const ChunkGroups& groups, int stages) {
  Schedule schedule = empty_schedule(stages);
  const std::vector<ScheduleItem> order = forward_order(groups);
  for (int s = 0; s < stages; ++s) {
    StageList list(schedule.stages[s], s, stages);
    for (const ScheduleItem& i : order) list.forward(i);
  }
  return schedule;
}

ScheduleCosts schedule_costs(const PipelineCosts& costs, const std::vector<MicroBatch>& list) {
  std::vector<double> forward, weight, hop;
  for (const MicroBatch& m : list) {
    forward.push_back(costs.micro_batch_s + costs.token_s * static_cast<double>(m.tokens()) +
                      costs.pair_s * m.attention_pairs());
    weight.push_back(costs.backward_over_forward * costs.weight_share * costs.token_s *
                     static_cast<double>(m.tokens()));
    hop.push_back(costs.hop_token_s * static_cast<double>(m.tokens()));
  }
  return {[forward, weight, hop, backward = costs.backward_over_forward](int, const Op& op) {
    const auto m = static_cast<std::size_t>(op.micro_batch);
    switch (op.kind) {
      case OpKind::forward:
      case OpKind::recompute:
        return forward[m];
      case OpKind::backward:
        return backward * forward[m];
      case OpKind::backward_input:
        return backward * forward[m] - weight[m];
      case OpKind::backward_weight:
        return weight[m];
      case OpKind::send:
        return hop[m];
      default:
        return 0.0;
    }
  }};
}

namespace {

/// Where in a list, whose next op is a micro-batch's recompute, the fetch of its input begins:
/// ahead of the computation before that (and of what that one receives), so that it runs beside it.
std::ptrdiff_t fetch_place(const std::vector<Op>& list, int micro_batch) {
  auto at = list.rbegin();
  const auto away = [&](const Op& op) {
    return op.kind == OpKind::offload && op.micro_batch == micro_batch;
  };
  while (at != list.rend() && !computes(at->kind) && !away(*at)) ++at;
  if (at != list.rend() && computes(at->kind))
    for (++at; at != list.rend() && at->kind == OpKind::recv;) ++at;
  return list.rend() - at;
}

}  // namespace

Schedule with_offload(const Schedule& schedule) {
  Schedule result = schedule;
  for (std::size_t s = 1; s < schedule.stages.size(); ++s) {
    std::set<int> again;
    for (const Op& op : schedule.stages[s])
      if (op.kind == OpKind::recompute) again.insert(op.micro_batch);
    std::vector<Op>& list = result.stages[s];
    list.clear();
    for (const Op& op : schedule.stages[s]) {
      if (op.kind == OpKind::recompute)
        list.insert(list.begin() + fetch_place(list, op.micro_batch),
                    {OpKind::fetch, op.micro_batch, op.chunk});
      list.push_back(op);
      if (op.kind == OpKind::forward && again.count(op.micro_batch) != 0)
        list.push_back({OpKind::offload, op.micro_batch, op.chunk});
    }
  }
  return result;
}

Schedule plan_schedule(const std::vector<MicroBatch>& list, const PipelineOptions& options) {
  return plan_schedule(list, options, schedule_costs(options.costs, list));
}

Schedule plan_schedule(const std::vector<MicroBatch>& list, const PipelineOptions& options,
                       const ScheduleCosts& costs) {
  const ChunkGroups groups = chunk_groups(list);
  const auto plan = [&] {
    if (options.schedule == ScheduleKind::gpipe) return gpipe_schedule(groups, options.stages);
    if (options.schedule == ScheduleKind::one_f_one_b)
      return one_f_one_b_schedule(groups, options.stages);
    return state_aware_schedule(groups, options.stages, options.k, costs, options.search,
                                options.schedule == ScheduleKind::zero_bubble);
  };
  return options.offload ? with_offload(plan()) : plan();
}

Schedule gpipe_schedule(const ChunkGroups& groups, int stages) {
  Schedule schedule = empty_schedule(stages);
  const std::vector<ScheduleItem> order = forward_order(groups);
  for (int s = 0; s < stages; ++s) {
    StageList list(schedule.stages[s], s, stages);
    for (const ScheduleItem& i : order) list.forward(i);
    for (auto i = order.rbegin(); i != order.rend(); ++i) list.backward(*i);
  }
  return schedule;
}

Schedule one_f_one_b_schedule(const ChunkGroups& groups, int stages) {
  Schedule schedule = empty_schedule(stages);
  const std::vector<ScheduleItem> forward = forward_order(groups),
                                  backward = backward_order(forward);
  for (int s = 0; s < stages; ++s) {
    StageList list(schedule.stages[s], s, stages);
    std::size_t done = 0;
    for (std::size_t b = 0; b < backward.size(); ++b) {
      // The last stage forwards a whole group, then goes backward through it; a stage before it is
      // P - 1 - s forwards ahead.
      const std::size_t group_end = b + static_cast<std::size_t>(backward[b].chunk) + 1;
      const std::size_t until =
          std::min(forward.size(), group_end + static_cast<std::size_t>(stages - 1 - s));
      while (done < until) list.forward(forward[done++]);
      list.backward(backward[b]);
    }
  }
  return schedule;
}

}  // namespace ballast
