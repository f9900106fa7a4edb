#include "app/observe/step_statistics.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "core/observe/metrics.hpp"

namespace ballast {
namespace {

/// Longest over mean of the micro-batches' seconds, each averaged over the ranks that run it: its
/// stages, its ring and the data-parallel ranks that share it.  Collective.
double micro_batch_imbalance(const EventSums& sums, const StepPlan& plan, const Mesh& mesh) {
  std::vector<double> times(plan.micro_batches.size(), 0.0);
  const std::vector<int>& mine = plan.lanes.at(static_cast<std::size_t>(mesh.at.dp)).micro_batches;
  const double of_lane = static_cast<double>(mesh.world.size()) / mesh.shape.dp;
  for (std::size_t i = 0; i < std::min(mine.size(), sums.micro_batch_s.size()); ++i) {
    const auto id = static_cast<std::size_t>(mine[i]);
    times[id] = sums.micro_batch_s[i] / (of_lane * plan.micro_batches[id].group.ranks);
  }
  mesh.world.all_reduce(std::span<double>(times));
  return imbalance_degree(times);
}

}  // namespace

EventSums sum_events(std::span<const Event> events, std::int64_t step, std::size_t micro_batches) {
  EventSums sums;
  sums.reduction_s = kind_seconds(events, EventKind::gradient_reduce, step) +
                     kind_seconds(events, EventKind::parameter_gather, step);
  sums.spent = overhead_seconds(events, step);
  sums.micro_batch_s.assign(micro_batches, 0.0);
  const std::vector<double> exclusive = exclusive_seconds(events);
  for (std::size_t i = 0; i < events.size(); ++i) {
    const Event& e = events[i];
    if (e.step != step) continue;
    if (useful(e.kind)) {
      sums.compute_s += exclusive[i];
      if (e.micro_batch >= 0)
        sums.micro_batch_s.at(static_cast<std::size_t>(e.micro_batch)) += exclusive[i];
    }
    if (!is_schedule_op(e.kind) || e.layer >= 0) continue;
    sums.first_begin_s = sums.scheduled ? std::min(sums.first_begin_s, e.begin_s) : e.begin_s;
    sums.last_end_s = sums.scheduled ? std::max(sums.last_end_s, e.end_s) : e.end_s;
    sums.scheduled = true;
  }
  return sums;
}

void add_budgets(EventSums& sums, std::span<const BudgetRow> rows) {
  for (const BudgetRow& row : rows) {
    ++sums.choices;
    if (row.overflow == 0) continue;
    ++sums.cut_choices;
    sums.cut_mass += row.overflow_mass;
  }
}

void add_drift(EventSums& sums, std::span<const DriftRow> rows) {
  for (const DriftRow& row : rows) {
    sums.drift_queries += row.queries;
    sums.drift += row.queries * (row.now - row.before);
  }
}

StepStatistics measure(const StepOutcome& outcome, const EventSums& sums, const StepPlan& plan,
                       const Mesh& mesh) {
  StepStatistics all;
  all.outcome = outcome;
  all.tokens = plan.tokens();
  all.loss_tokens = plan.loss_tokens;
  all.recorded = sums.recorded;
  all.compute_s = sums.compute_s;
  all.reduction_s = sums.reduction_s;
  all.spent = sums.spent;
  all.memory = memory_use();
  all.ranks = mesh.world.size();

  all.imbalance = micro_batch_imbalance(sums, plan, mesh);
  constexpr double kNever = -std::numeric_limits<double>::max();
  std::array<double, 6> largest{static_cast<double>(all.memory.peak_total),
                                sums.spent.tuning_s,
                                sums.spent.planning_s,
                                sums.scheduled ? -sums.first_begin_s : kNever,
                                sums.scheduled ? sums.last_end_s : kNever,
                                sums.compute_s};
  std::array<double, 10> totals{sums.compute_s,      sums.recall.queries, sums.recall.mean,
                                sums.recall.squares, sums.choices,        sums.cut_choices,
                                sums.cut_mass,       sums.drift_queries,  sums.drift,
                                sums.reduction_s};
  auto& [compute_s, queries, recall, squares, choices, cut, cut_mass, drift_queries, drift,
         reduction_s] = totals;
  mesh.world.all_reduce(std::span<double>(largest), Reduction::max);
  mesh.world.all_reduce(std::span<double>(totals));
  const auto& [peak_bytes, tuning_s, planning_s, minus_begin_s, end_s, most_compute_s] = largest;
  all.largest_peak_bytes = static_cast<std::int64_t>(peak_bytes);
  all.most_spent = {tuning_s, planning_s};
  all.mean_reduction_s = reduction_s / all.ranks;
  if (cut > 0) all.caps = CapFacts{cut / choices, cut_mass / choices};
  if (drift_queries > 0) all.drift = drift / drift_queries;
  if (queries > 0) all.recall = recall_facts({queries, recall, squares});
  if (most_compute_s > 0) all.load_balance = compute_s / all.ranks / most_compute_s;
  all.idle_ranks = plan.idle_lanes() * (all.ranks / static_cast<int>(plan.lanes.size()));
  if (outcome.predicts && sums.recorded)
    all.schedule = ScheduleSeconds{std::max(0.0, minus_begin_s + end_s), outcome.predicted_s};
  return all;
}

}  // namespace ballast
