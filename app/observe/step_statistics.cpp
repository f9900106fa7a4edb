#include "app/observe/step_statistics.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "core/observe/metrics.hpp"

namespace ballast {

EventSums sum_events(std::span<const Event> events, std::int64_t step, std::size_t micro_batches) {
  EventSums sums;
  sums.compute_s = useful_seconds(events, step);
  sums.reduction_s = kind_seconds(events, EventKind::gradient_reduce, step) +
                     kind_seconds(events, EventKind::parameter_gather, step);
  sums.spent = overhead_seconds(events, step);
  sums.micro_batch_s.assign(micro_batches, 0.0);
  for (const Event& e : events) {
    if (e.step != step || !is_schedule_op(e.kind)) continue;
    if (computes(e.kind))
      sums.micro_batch_s.at(static_cast<std::size_t>(e.micro_batch)) += e.end_s - e.begin_s;
    if (e.layer >= 0) continue;
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

  // A micro-batch's time is averaged over its ring; one without tokens does not count.
  std::vector<double> times = sums.micro_batch_s;
  if (mesh.cp.size() > 1) mesh.cp.all_reduce(std::span<double>(times));
  constexpr double kNever = -std::numeric_limits<double>::max();
  std::array<double, 7> largest{times.empty() ? 0 : *std::max_element(times.begin(), times.end()),
                                static_cast<double>(all.memory.peak_total),
                                sums.spent.tuning_s,
                                sums.spent.planning_s,
                                sums.scheduled ? -sums.first_begin_s : kNever,
                                sums.scheduled ? sums.last_end_s : kNever,
                                sums.compute_s};
  std::array<double, 12> totals{0,
                                0,
                                sums.compute_s,
                                sums.recall.queries,
                                sums.recall.mean,
                                sums.recall.squares,
                                sums.choices,
                                sums.cut_choices,
                                sums.cut_mass,
                                sums.drift_queries,
                                sums.drift,
                                sums.reduction_s};
  auto& [total_s, count, compute_s, queries, recall, squares, choices, cut, cut_mass, drift_queries,
         drift, reduction_s] = totals;
  for (const double s : times) total_s += s;
  const std::vector<MicroBatch> mine = plan.list(mesh.at.dp);
  count = static_cast<double>(
      std::count_if(mine.begin(), mine.end(), [](const MicroBatch& m) { return m.tokens() > 0; }));
  mesh.world.all_reduce(std::span<double>(largest), Reduction::max);
  mesh.world.all_reduce(std::span<double>(totals));
  const auto& [longest_s, peak_bytes, tuning_s, planning_s, minus_begin_s, end_s, most_compute_s] =
      largest;
  all.largest_peak_bytes = static_cast<std::int64_t>(peak_bytes);
  all.most_spent = {tuning_s, planning_s};
  all.mean_reduction_s = reduction_s / all.ranks;
  const double mean_s = total_s / std::max(1.0, count);
  all.imbalance = mean_s > 0 ? longest_s / mean_s : 1;
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
