// Imbalance metrics, one definition each.  Inputs are plain numbers; the report's tables print the formula once.
#pragma once
#include <span>
#include <string>
#include <vector>

namespace ballast {

/// max / mean; 1 for an empty or all-zero input.
double imbalance_degree(std::span<const double> values);

/// times[w][t]: computation seconds of context-parallel worker w at ring step t.
/// Worker level: imbalance over workers at a step, averaged over steps.  Step level: over steps at a worker, averaged
/// over workers (MTraining Section 5.5, Table 5).
double worker_imbalance(const std::vector<std::vector<double>>& times);
double step_imbalance(const std::vector<std::vector<double>>& times);
/// Computation time / ring-step wall time, mean over workers and steps.
double computation_ratio(const std::vector<std::vector<double>>& compute, const std::vector<std::vector<double>>& wall);

/// sum_i (max - x_i) / (max N): DBR with tokens a device, ABR with sum of squared lengths a device, PR with tokens of
/// packs against `capacity` (HBP Equations 1 and 2).
double balance_ratio(std::span<const double> values);
double padding_ratio(std::span<const double> pack_tokens, double capacity);

/// POP efficiencies from useful computation seconds per rank and the run time.
struct Pop { double load_balance = 1, communication_efficiency = 1, parallel_efficiency = 1; };
Pop pop(std::span<const double> useful, double runtime);

}  // namespace ballast
