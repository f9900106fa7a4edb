#include "app/train/budget_tuning.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "app/plan/deck_profile.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

BudgetTuning::BudgetTuning(const Config& config, const Device* device)
    : tune_(config.dst.enabled),
      options_(dst_options(config)),
      base_(options_.base_budget),
      averages_(static_cast<double>(options_.base_budget), config.sab.decay) {
  if (!config.profile.table.empty()) load_profile(config, notes_, device);
}

void BudgetTuning::begin_step(const StepPlan& plan, int dp_rank) {
  policies_.clear();
  mine_.clear();
  dp_rank_ = dp_rank;
  for (const int id : plan.lanes.at(static_cast<std::size_t>(dp_rank)).micro_batches)
    mine_.push_back(plan.micro_batches.at(static_cast<std::size_t>(id)));
}

BudgetPolicy* BudgetTuning::policy(int m) {
  if (!tune_) return nullptr;
  auto& policy = policies_[m];
  if (!policy) {
    const TuningTarget& t = mine_.at(static_cast<std::size_t>(m)).tuning;
    policy = std::make_unique<DstPolicy>(
        options_, TuningTarget{t.base_budget, t.anchor_budget, t.above_anchor});
  }
  return policy.get();
}

std::vector<double> BudgetTuning::bin_sums() const {
  std::vector<double> sums(2 * BudgetAverages::kBins, 0);
  for (const auto& [m, policy] : policies_)
    for (const DstPolicy::Choice& choice : policy->choices())
      for (const Segment& s : mine_.at(static_cast<std::size_t>(m)).segments) {
        if (mine_[static_cast<std::size_t>(m)].group.first != dp_rank_) continue;  // counted once
        const auto bin = static_cast<std::size_t>(BudgetAverages::bin(s.end));
        sums[bin] += static_cast<double>(choice.budget);
        sums[BudgetAverages::kBins + bin] += 1;
      }
  return sums;
}

void BudgetTuning::end_step(std::span<const double> sums) {
  averages_.update(sums.subspan(0, BudgetAverages::kBins),
                   sums.subspan(BudgetAverages::kBins, BudgetAverages::kBins));
}

BudgetFacts BudgetTuning::facts() const {
  BudgetFacts f;
  for (const auto& [m, policy] : policies_)
    for (const DstPolicy::Choice& choice : policy->choices()) {
      ++f.choices;
      f.mean_budget += (static_cast<double>(choice.budget) - f.mean_budget) / f.choices;
      f.mean_coverage_loss += (choice.coverage_loss - f.mean_coverage_loss) / f.choices;
      f.largest_coverage_loss = std::max(f.largest_coverage_loss, choice.coverage_loss);
    }
  return f;
}

std::string BudgetTuning::choices() const {
  nlohmann::json rows;
  for (const auto& [m, policy] : policies_)
    for (const DstPolicy::Choice& c : policy->choices())
      rows.push_back(
          {m, c.layer, options_.base_budget, c.budget, std::round(c.coverage_loss * 1e6) * 1e-6});
  return rows.empty() ? "" : rows.dump();
}

}  // namespace ballast
