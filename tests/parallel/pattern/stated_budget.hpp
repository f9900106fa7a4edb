// A policy of budgets that tests steer.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/plan/attention/budget_policy.hpp"

namespace ballast {

/// Takes one stated budget and keeps the coverage that it was told.
class Stated final : public BudgetPolicy {
 public:
  explicit Stated(std::int64_t budget,
                  std::vector<std::int64_t> candidates = {1, 2, 3, 4, 6, 9, 14})
      : candidates_(std::move(candidates)), budget_(budget) {}
  std::span<const std::int64_t> candidates() const override { return candidates_; }
  std::int64_t choose(int, std::span<const double> told) override {
    coverage.assign(told.begin(), told.end());
    return budget_;
  }
  std::vector<double> coverage;

 private:
  std::vector<std::int64_t> candidates_;
  std::int64_t budget_;
};

}  // namespace ballast
