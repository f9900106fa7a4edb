// Imbalance metrics, one definition each.  Inputs are plain numbers; the report's tables print the
// formula once. app/report/metrics.py repeats these definitions for traces; one set of numbers
// tests both (docs/metrics.md).
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/observe/events.hpp"

namespace ballast {

/// max / mean; 1 for an empty or all-zero input.  Over the micro-batches of one step, each with its
/// execution time averaged over the ranks that run it, this is `imbalance` (SparseBalance Equation
/// 11).
double imbalance_degree(std::span<const double> values);

/// times[w][t]: computation seconds of context-parallel worker w at ring step t.
/// Worker level: imbalance over workers at a step, averaged over steps.  Step level: over steps at
/// a worker, averaged over workers (MTraining Section 5.5, Table 5).  Error: workers with different
/// numbers of steps.
double worker_imbalance(const std::vector<std::vector<double>>& times);
double step_imbalance(const std::vector<std::vector<double>>& times);
/// Computation time / ring-step wall time, mean over workers and steps; a step without wall time is
/// left out.
double computation_ratio(const std::vector<std::vector<double>>& compute,
                         const std::vector<std::vector<double>>& wall);

/// sum_i (max - x_i) / (max N): DBR with tokens a device, ABR with sum of squared lengths a device,
/// PR with tokens of packs against `capacity` (HBP Equations 1 and 2).  0 for an empty or all-zero
/// input.
double balance_ratio(std::span<const double> values);
double padding_ratio(std::span<const double> pack_tokens, double capacity);

/// POP efficiencies from useful computation seconds per rank and the run time: mean / max useful,
/// max useful / runtime, and their product (POP Centre of Excellence, standard metrics).  All 1
/// where nothing ran.
struct Pop {
  double load_balance = 1, communication_efficiency = 1, parallel_efficiency = 1;
};
Pop pop(std::span<const double> useful, double runtime);

/// Seconds of each event that no later-begun event of the same rank covers, in the order given: a
/// layer without the attention inside it, a step without everything inside it.  Times of all events
/// of one rank then add up to the time it spent; kinds that run beside() the others have none.
std::vector<double> exclusive_seconds(std::span<const Event> events);
/// Seconds of one rank's events of `kind` in `step`, with all that lies inside them; such events
/// must not nest in one another.
double kind_seconds(std::span<const Event> events, EventKind kind, std::int64_t step);

/// What share of their steps some work takes: the seconds of the rank that spends most in a step,
/// summed over steps, over the sum of their times.  The first step, which has costs of its own, is
/// left out where there are others.
class OverheadShare {
 public:
  void add(double most_s, double step_s);
  double share() const;  ///< 0 before any step
 private:
  std::int64_t steps_ = 0;
  double spent_s_ = 0, whole_s_ = 0;
};

}  // namespace ballast
