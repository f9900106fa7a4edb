#include "core/predict/simulate.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "core/base/error.hpp"
#include "core/observe/metrics.hpp"
#include "core/predict/bucket_overlap.hpp"
#include "core/predict/step_memory.hpp"

namespace ballast {
namespace {

/// The buckets of a stage; none where nothing is known of them.
StageBuckets stage_buckets(const StepPlan& plan, const SimulationOptions& options,
                           std::size_t stage) {
  if (stage >= options.buckets.size()) return {};
  const std::int64_t first = plan.layer_begin.at(stage), end = stage + 1 < plan.layer_begin.size()
                                                                   ? plan.layer_begin[stage + 1]
                                                                   : options.layers;
  return {options.buckets[stage], first, end - first};
}

/// Seconds of what follows the rounds' backwards, [stage][round].
std::vector<std::vector<double>> round_seconds(const StepPlan& plan,
                                               const SimulationOptions& options, const Costs& costs,
                                               const HidingPasses& hiding) {
  const std::size_t stages = plan.layer_begin.size(),
                    rounds = static_cast<std::size_t>(plan.rounds());
  std::vector<std::vector<double>> list(stages, std::vector<double>(rounds, 0));
  if (!plan.reduces_by_round()) return list;
  std::vector<StageBuckets> buckets;
  std::vector<std::vector<double>> backward;
  for (std::size_t s = 0; s < stages; ++s) {
    buckets.push_back(stage_buckets(plan, options, s));
    backward.push_back(hiding.round_backward_s(s));
  }
  for (const PlannedCollective& c : plan.collectives) {
    if (c.after_round < 0) continue;
    const auto s = static_cast<std::size_t>(c.stage), r = static_cast<std::size_t>(c.after_round);
    const double seconds = costs.reduce(
        {c.elements, plan.mesh.replicas(), replica_link(plan.mesh, c.stage), plan.zero > 0});
    list.at(s).at(r) += exposed_reduction_s(buckets.at(s), seconds, backward.at(s).at(r));
  }
  return list;
}

/// What all replicas of a stage do when their last operation is done.  `ready_s` [stage] moves.
class StepEnd {
 public:
  StepEnd(const StepPlan& plan, const SimulationOptions& options, const Costs& costs,
          const HidingPasses& hiding, const std::vector<std::vector<LaneStage>>& lanes,
          std::vector<double> ready_s)
      : plan_(plan),
        options_(options),
        costs_(costs),
        hiding_(hiding),
        lanes_(lanes),
        ready_s_(std::move(ready_s)),
        optimizer_s_(ready_s_.size(), 0.0) {}

  void add(const PlannedCollective& c, StepTerms& terms) {
    const int replicas = plan_.mesh.replicas();
    const Link link = replica_link(plan_.mesh, c.stage);
    const auto stage = static_cast<std::size_t>(c.stage);
    const double share = 1.0 / static_cast<double>(ready_s_.size());
    double seconds = 0;
    switch (c.kind) {
      case CollectiveKind::gradient_reduce:
        seconds = exposed_reduction_s(stage_buckets(plan_, options_, stage),
                                      costs_.reduce({c.elements, replicas, link, plan_.zero > 0}),
                                      hiding_.last_backward_s(lanes_, stage));
        ready_s_[stage] += seconds;
        terms.reduction_s += share * seconds;
        break;
      case CollectiveKind::tied_sum:
        seconds = costs_.reduce({c.elements, 2, tied_link(plan_.mesh), false, plan_.zero == 2});
        ready_s_.front() = ready_s_.back() = std::max(ready_s_.front(), ready_s_.back()) + seconds;
        terms.reduction_s +=
            share * seconds * std::min<double>(2, static_cast<double>(ready_s_.size()));
        break;
      case CollectiveKind::gradient_norm:
        seconds = costs_.reduce({1, plan_.mesh.size(), world_link(plan_.mesh), false});
        if (!std::exchange(joined_, true))
          ready_s_.assign(ready_s_.size(), end_s() + seconds), terms.reduction_s += seconds;
        break;
      case CollectiveKind::optimizer:
        seconds = costs_.optimizer(
            plan_.zero > 0 ? (c.elements + replicas - 1) / replicas : c.elements, plan_.zero == 2);
        if (!options_.muon.empty()) {
          const MuonCost& muon = options_.muon.at(stage);
          seconds += costs_.products(muon.flops);
          if (muon.moved > 0) seconds += 2 * costs_.reduce({muon.moved, replicas, link, true});
        }
        ready_s_[stage] += seconds;
        optimizer_s_[stage] += seconds;
        terms.optimizer_s += share * seconds;
        break;
      case CollectiveKind::parameter_gather:
        // Beside the next step's forward, but counted here.
        seconds = exposed_gather_s(stage_buckets(plan_, options_, stage),
                                   costs_.gather({c.elements, replicas, link, true}),
                                   hiding_.first_forward_s(stage));
        ready_s_[stage] += seconds;
        terms.gather_s += share * seconds;
        break;
    }
  }
  double end_s() const { return *std::max_element(ready_s_.begin(), ready_s_.end()); }
  /// POP over all lanes and stages: recomputation and the optimizer are useful as in a trace.
  double load_balance() const {
    std::vector<double> useful;
    for (const std::vector<LaneStage>& lane : lanes_)
      for (std::size_t s = 0; s < lane.size(); ++s)
        useful.push_back(lane[s].parts.compute_s + lane[s].parts.recompute_s + optimizer_s_[s]);
    return pop(useful, end_s()).load_balance;
  }

 private:
  const StepPlan& plan_;
  const SimulationOptions& options_;
  const Costs& costs_;
  const HidingPasses& hiding_;
  const std::vector<std::vector<LaneStage>>& lanes_;
  std::vector<double> ready_s_, optimizer_s_;  ///< [stage]
  bool joined_ = false;                        // one norm of all stages, however many list it
};

void add_micro_batches(const StepPlan& plan,
                       const std::vector<std::shared_ptr<const MicroBatchTimes>>& times,
                       SimulatedStep& step) {
  std::vector<double> totals, forwards;
  for (const auto& t : times) {
    forwards.push_back(t->forward_s());
    totals.push_back(forwards.back() + t->backward_s());
  }
  std::vector<char> again(times.size(), 0);
  for (const PlannedLane& lane : plan.lanes)
    for (const Op& op : plan.schedules.at(static_cast<std::size_t>(lane.schedule)).stages.front()) {
      if (op.kind != OpKind::recompute) continue;
      ++step.recomputed;
      const auto id =
          static_cast<std::size_t>(lane.micro_batches.at(static_cast<std::size_t>(op.micro_batch)));
      if (std::exchange(again[id], 1) != 0) continue;  // another rank's part of it
      const double head_s = times[id]->head_s / static_cast<double>(plan.layer_begin.size());
      totals[id] += forwards[id] - head_s;
    }
  step.imbalance = imbalance_degree(totals);
  if (forwards.empty()) return;
  for (const double s : forwards) step.forward_mean_s += s / static_cast<double>(forwards.size());
  const auto [least, most] = std::minmax_element(forwards.begin(), forwards.end());
  step.forward_min_s = *least, step.forward_max_s = *most;
}

/// Sums over lanes; returns when each stage's last lane is done.
std::vector<double> add_lanes(const StepPlan& plan, SimulatedStep& step) {
  const std::size_t stages = plan.layer_begin.size();
  std::vector<double> ready_s(stages, 0.0);
  step.live.assign(stages, 0), step.weight_halves.assign(stages, 0);
  PassParts parts;
  for (const std::vector<LaneStage>& lane : step.lanes) {
    double first_s = std::numeric_limits<double>::max(), last_s = 0;
    for (std::size_t s = 0; s < lane.size(); ++s) {
      ready_s[s] = std::max(ready_s[s], lane[s].end_s);
      step.pipelines.useful_s += lane[s].useful_s;
      if (lane[s].last_s > 0) {
        first_s = std::min(first_s, lane[s].first_s);
        last_s = std::max(last_s, lane[s].last_s);
      }
      parts.add(lane[s].parts);
      step.terms.reduction_s += lane[s].round_s;
      step.live[s] = std::max(step.live[s], lane[s].live);
      step.weight_halves[s] = std::max(step.weight_halves[s], lane[s].weight_halves);
    }
    if (last_s > 0) step.pipelines.pipeline_s += static_cast<double>(stages) * (last_s - first_s);
  }
  step.schedule_s = *std::max_element(ready_s.begin(), ready_s.end());
  const double ranks = std::max<double>(1, static_cast<double>(step.lanes.size() * stages));
  step.terms.compute_s = parts.compute_s / ranks;
  step.terms.recompute_s = parts.recompute_s / ranks;
  step.terms.ring_s = parts.ring_s / ranks;
  step.terms.exchange_s = parts.exchange_s / ranks;
  step.terms.reduction_s /= ranks;
  return ready_s;
}

}  // namespace

std::vector<std::pair<std::string, double>> StepTerms::list() const {
  return {{"compute", compute_s},     {"recompute", recompute_s}, {"exposed_ring", ring_s},
          {"exchange", exchange_s},   {"bubble", bubble_s},       {"reduction", reduction_s},
          {"optimizer", optimizer_s}, {"gather", gather_s}};
}

SimulatedStep simulate(const StepPlan& plan, const SimulationOptions& options, const Costs& costs) {
  MicroBatchClock clock(plan, options, costs);
  std::vector<std::shared_ptr<const MicroBatchTimes>> times;
  times.reserve(plan.micro_batches.size());
  for (std::size_t id = 0; id < plan.micro_batches.size(); ++id)
    times.push_back(clock.times(static_cast<int>(id)));

  SimulatedStep step;
  step.budgets = clock.budgets();
  add_micro_batches(plan, times, step);
  const HidingPasses hiding(plan, times);
  step.lanes =
      run_lanes({plan, times, round_seconds(plan, options, costs, hiding), options.keep_ops});
  StepEnd end(plan, options, costs, hiding, step.lanes, add_lanes(plan, step));
  for (const PlannedCollective& c : plan.collectives)
    if (c.after_round < 0) end.add(c, step.terms);
  step.step_s = end.end_s();
  step.load_balance = end.load_balance();

  step.memory = step_memory(plan, options);
  step.idle_ranks = plan.idle_lanes() * (plan.mesh.size() / std::max(1, plan.mesh.dp));
  StepTerms& t = step.terms;
  t.bubble_s = step.step_s - (t.compute_s + t.recompute_s + t.ring_s + t.exchange_s +
                              t.reduction_s + t.optimizer_s + t.gather_s);
  return step;
}

}  // namespace ballast
