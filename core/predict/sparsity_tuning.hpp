// Dynamic sparsity tuning: the attention budget of a layer and micro-batch, from predicted latency
// and the coverage that its routing scores give.  Source: SparseBalance Section IV-A, Equations 3
// to 7, Algorithm 1.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/plan/attention/budget_policy.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// Equation 3: phi of the micro-batches' predicted latencies (path: their mean).  Error: no
/// latency.
double anchor_latency(Anchor anchor, std::span<const double> latencies);

struct DstOptions {
  Anchor anchor = Anchor::mean;
  double threshold = 0.1;                ///< p: largest drop of coverage
  std::int64_t base_budget = 32;         ///< what the pattern computes without tuning
  std::vector<std::int64_t> candidates;  ///< K, ascending, base_budget among them
  CoverageBound bound = CoverageBound::layer;
  double dead_band = 0;  ///< latencies within this share of the anchor keep the base budget
};
/// About four budgets to the octave from an eighth of `base` (at least 1) to four times it,
/// ascending, `base` among them.
std::vector<std::int64_t> default_candidates(std::int64_t base);

/// Of a micro-batch with this latency; `align` gives the largest candidate within the anchor.
TuningTarget tuning_target(double latency_s, double anchor_s, const DstOptions& options,
                           const std::function<std::int64_t()>& align);

/// Equation 7.  coverage[i] = C(candidates[i]), non-decreasing (Equation 4).  A micro-batch at or
/// below the anchor takes the anchor's budget.  One above takes the largest budget within anchor
/// and bound (Equation 6); where none is, the smallest whose drop from the base's coverage is at
/// most `threshold` (Algorithm 1, line 10), which is never above the base.
std::int64_t final_budget(const TuningTarget& target, std::span<const std::int64_t> candidates,
                          std::span<const double> coverage, double threshold);

/// Coverage lost against the base budget; negative where it gained.
double coverage_loss(const TuningTarget& target, std::span<const std::int64_t> candidates,
                     std::span<const double> coverage, std::int64_t budget);

/// Budgets of one micro-batch's layers on a stage, in their order.  Under a bound of the stage a
/// layer may lose what the layers before it left of p, and takes back the budget that they kept
/// above the anchor: at every layer the mean loss so far is at most p, and no budget is above that
/// of a bound of each layer.
class LayerBudgets {
 public:
  /// `options` must outlive it.
  LayerBudgets(const DstOptions& options, const TuningTarget& target)
      : options_(options), target_(target) {}
  std::int64_t next(std::span<const double> coverage);

 private:
  const DstOptions& options_;
  TuningTarget target_;
  double left_ = 0;         ///< of the bounds of the layers before
  std::int64_t above_ = 0;  ///< what they have above the anchor's budget
};

/// The policy of one micro-batch on one rank; keeps what it chose for trace and averages.
class DstPolicy final : public BudgetPolicy {
 public:
  struct Choice {
    int layer = 0;
    std::int64_t budget = 0;
    double coverage_loss = 0;
  };
  /// `options` must outlive it.
  DstPolicy(const DstOptions& options, const TuningTarget& target)
      : options_(options), target_(target), budgets_(options, target) {}
  std::span<const std::int64_t> candidates() const override { return options_.candidates; }
  std::int64_t choose(int layer, std::span<const double> coverage) override;
  const std::vector<Choice>& choices() const { return choices_; }

 private:
  const DstOptions& options_;
  TuningTarget target_;
  LayerBudgets budgets_;
  std::vector<Choice> choices_;
};

}  // namespace ballast
