#include "core/predict/sparsity_tuning.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "core/base/error.hpp"
#include "core/predict/latency_model.hpp"

namespace ballast {
namespace {

/// Place of a budget among the candidates.
std::size_t place(std::span<const std::int64_t> candidates, std::int64_t budget) {
  const auto at = std::lower_bound(candidates.begin(), candidates.end(), budget);
  require(at != candidates.end() && *at == budget, "budget {} is none of the candidates", budget);
  return static_cast<std::size_t>(at - candidates.begin());
}

}  // namespace

double anchor_latency(Anchor anchor, std::span<const double> latencies) {
  require(!latencies.empty(), "an anchor needs at least one micro-batch");
  if (anchor == Anchor::min) return *std::min_element(latencies.begin(), latencies.end());
  if (anchor == Anchor::max) return *std::max_element(latencies.begin(), latencies.end());
  return std::accumulate(latencies.begin(), latencies.end(), 0.0) /
         static_cast<double>(latencies.size());
}

std::vector<std::int64_t> default_candidates(std::int64_t base) {
  std::vector<std::int64_t> list;
  for (int step = -12; step <= 8; ++step) {
    const auto k =
        std::max<std::int64_t>(1, std::llround(static_cast<double>(base) * std::exp2(step / 4.0)));
    if (list.empty() || k > list.back()) list.push_back(k);
  }
  return list;
}

TuningTarget tuning_target(double latency_s, double anchor_s, const DstOptions& options,
                           const std::function<std::int64_t()>& align) {
  // The mean of equal latencies may differ from them by last bits.
  constexpr double kSame = 1e-9;
  if (std::abs(latency_s - anchor_s) <= std::max(options.dead_band, kSame) * anchor_s)
    return {options.base_budget, options.base_budget, false};
  return {options.base_budget, align(), latency_s > anchor_s};
}

std::int64_t final_budget(const TuningTarget& target, std::span<const std::int64_t> candidates,
                          std::span<const double> coverage, double threshold) {
  require(coverage.size() == candidates.size(), "coverage at {} budgets for {} candidates",
          coverage.size(), candidates.size());
  if (!target.above_anchor) return target.anchor_budget;
  const double least = coverage[place(candidates, target.base_budget)] - threshold;
  // Coverage never falls with the budget: from here on the bound holds.
  const auto kept = std::lower_bound(coverage.begin(), coverage.end(), least);
  return std::max(target.anchor_budget,
                  candidates[static_cast<std::size_t>(kept - coverage.begin())]);
}

double coverage_loss(const TuningTarget& target, std::span<const std::int64_t> candidates,
                     std::span<const double> coverage, std::int64_t budget) {
  return coverage[place(candidates, target.base_budget)] - coverage[place(candidates, budget)];
}

std::int64_t LayerBudgets::next(std::span<const double> coverage) {
  const std::vector<std::int64_t>& candidates = options_.candidates;
  if (!target_.above_anchor || options_.bound == CoverageBound::layer)
    return final_budget(target_, candidates, coverage, options_.threshold);
  TuningTarget target = target_;
  const auto behind = std::upper_bound(candidates.begin(), candidates.end(),
                                       std::max(candidates.front(), target.anchor_budget - above_));
  target.anchor_budget = std::min(target.anchor_budget, *std::prev(behind));
  const double allowed = options_.threshold + left_;
  const std::int64_t budget = final_budget(target, candidates, coverage, allowed);
  left_ = std::max(0.0, allowed - coverage_loss(target, candidates, coverage, budget));
  above_ = std::max<std::int64_t>(0, above_ + budget - target_.anchor_budget);
  return budget;
}

std::int64_t DstPolicy::choose(int layer, std::span<const double> coverage) {
  const auto same = std::find_if(choices_.begin(), choices_.end(),
                                 [&](const Choice& c) { return c.layer == layer; });
  if (same != choices_.end()) return same->budget;  // the forward of a chunk runs again
  const std::int64_t budget = budgets_.next(coverage);
  choices_.push_back(
      {layer, budget, coverage_loss(target_, options_.candidates, coverage, budget)});
  return budget;
}

}  // namespace ballast
