// What one training step came to: measured once, shown by every sink (trace, log, JSON, progress).
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "app/observe/overheads.hpp"
#include "app/observe/recall_rows.hpp"
#include "core/base/device.hpp"
#include "core/observe/events.hpp"
#include "core/plan/step_plan.hpp"
#include "parallel/comm/mesh.hpp"

namespace ballast {

/// Budgets that this rank's micro-batches got in the step (dynamic sparsity tuning): means over
/// `choices`, one a micro-batch and layer.
struct BudgetFacts {
  double mean_budget = 0, mean_coverage_loss = 0, largest_coverage_loss = 0, choices = 0;
};

/// How far the caps on columns and slashes decided, over all micro-batches, layers, heads and
/// ranks.
struct CapFacts {
  double share = 0;  ///< of the choices that left out what their shares asked for
  double mass = 0;   ///< mean share of observed mass that a choice so lost
};

/// Seconds from the first schedule op of any rank to the end of the last one, and what the
/// simulator said of it.
struct ScheduleSeconds {
  double measured_s = 0, predicted_s = 0;
};

/// Means over the pairs of a global batch (loss.kind = "dpo").
struct PairFigures {
  double chosen_reward = 0, rejected_reward = 0, margin = 0;
  double accuracy = 0;  ///< share of the pairs whose chosen answer has the higher reward
  double chosen_log_probability = 0, rejected_log_probability = 0;
};

/// What the train loop knows of a step when it ends; the same on every rank, but for `plan_s`.
struct StepOutcome {
  std::int64_t step = 0, steps = 0;  ///< counted from 1; of the run
  double loss = 0, norm = 0, rate = 0;
  double seconds = 0;      ///< of the step
  double trained_s = 0;    ///< of all steps so far, earlier sessions included
  double plan_s = 0;       ///< host seconds of the step's plan
  double flops = 0;        ///< of the model, all ranks together
  double peak_flops = 0;   ///< dense rate of a rank in FLOP/s: the base of MFU
  double predicted_s = 0;  ///< simulated seconds of the schedule; counts where `predicts`
  bool predicts = false;
  std::optional<PairFigures> pairs;
};

/// A step's outcome with all that is derived from its events and its plan.
struct StepStatistics {
  StepOutcome outcome;
  std::int64_t tokens = 0, loss_tokens = 0;  ///< of the global batch
  bool recorded = false;  ///< whether the step's events were: what follows from them counts
  double compute_s = 0;   ///< this rank's useful seconds
  /// Seconds that reductions of gradients and gathers of parameters keep computation waiting: this
  /// rank's, and the mean over all.
  double reduction_s = 0, mean_reduction_s = 0;
  OverheadSeconds spent;                    ///< this rank's
  OverheadSeconds most_spent;               ///< of the rank that spends most
  double imbalance = 1;                     ///< SparseBalance Equation 11 over all micro-batches
  double load_balance = 1;                  ///< POP over all ranks: mean / max of useful seconds
  int idle_ranks = 0;                       ///< that the plan gives no micro-batch
  std::optional<ScheduleSeconds> schedule;  ///< where the outcome predicts and events tell
  std::optional<BudgetFacts> budgets;       ///< this rank's
  std::optional<CapFacts> caps;             ///< where a cap decided at all
  std::optional<double> drift;              ///< recall now - before, mean over queries and heads
  std::optional<RecallFacts> recall;        ///< of all layers and heads, where it was measured
  MemoryUse memory;                         ///< this rank's
  std::int64_t largest_peak_bytes = 0;      ///< of the rank that needs most
  int ranks = 1;

  double flops_per_s() const { return outcome.flops / ranks / outcome.seconds; }
  double mfu() const { return flops_per_s() / outcome.peak_flops; }
  double tokens_per_s() const {  ///< and rank
    return static_cast<double>(tokens) / outcome.seconds / ranks;
  }
};

/// This rank's events of one step, summed: what measure() needs of them.
struct EventSums {
  bool recorded = false;  ///< whether events were recorded at all, on every rank alike
  double compute_s = 0, reduction_s = 0;
  OverheadSeconds spent;
  std::vector<double> micro_batch_s;  ///< [micro-batch of the rank's list] useful, without waits
  double first_begin_s = 0, last_end_s = 0;           ///< of the stage's schedule ops
  bool scheduled = false;                             ///< whether there were any
  double choices = 0, cut_choices = 0, cut_mass = 0;  ///< of budgets (BudgetRow)
  double drift_queries = 0, drift = 0;                ///< of rows that no other rank adds
  RecallSums recall;                                  ///< of rows that no other rank adds
};
EventSums sum_events(std::span<const Event> events, std::int64_t step, std::size_t micro_batches);
/// Adds the choices of these rows.
void add_budgets(EventSums& sums, std::span<const BudgetRow> rows);

/// Adds rows of drift.
void add_drift(EventSums& sums, std::span<const DriftRow> rows);

/// Joins the sums of all ranks.  Collective: the only exchange that
/// observing a step costs.
StepStatistics measure(const StepOutcome& outcome, const EventSums& sums, const StepPlan& plan,
                       const Mesh& mesh);

}  // namespace ballast
