// Costs from a profile table: layers, head and links as measured, interpolated by LatencyModel.
// What a table does not hold (optimizer, collectives, host copies, links that were not measured,
// selective recompute without rows of its own) comes from the built-in rates of the hardware that
// it was measured on.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/predict/latency_model.hpp"
#include "core/predict/profile_table.hpp"
#include "core/predict/rate_costs.hpp"

namespace ballast {

class TableCosts final : public Costs {
 public:
  /// `name`: of the table, for titles.  `pattern`: whose attention rows count.  Errors: no rows of
  /// that pattern.
  TableCosts(std::string name, const ProfileTable& table, PatternKind pattern,
             const WorkShape& work);
  std::string source() const override { return "times of " + name_; }
  PassTime rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const override;
  PassTime head(std::int64_t tokens, const ContextSplit& split) const override;
  PassTime attention(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                     const ContextSplit& split, Recompute mode) const override;
  const PatternWork* pattern() const override { return work_.pattern.get(); }
  double exchange(std::int64_t tokens, const ContextSplit& split, Link link) const override;
  double ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel level, bool gradients,
                  Link link) const override;
  double ring_sums(std::int64_t tokens, const ContextSplit& split, bool gradients) const override {
    return rates_.ring_sums(tokens, split, gradients);
  }
  double stage_hop(std::int64_t tokens, const ContextSplit& split, Link link) const override;
  double host_copy(std::int64_t tokens, const ContextSplit& split) const override {
    return rates_.host_copy(tokens, split);
  }
  double reduce(const Collective& sum) const override { return rates_.reduce(sum); }
  double gather(const Collective& all) const override { return rates_.gather(all); }
  double optimizer(std::int64_t elements, bool full_gradients) const override {
    return rates_.optimizer(elements, full_gradients);
  }
  double products(double flops) const override { return rates_.products(flops); }

  /// Activation bytes that a layer keeps of one rank's `tokens`; 0 where they were not measured.
  double activation_bytes(std::int64_t tokens, Recompute mode) const;

 private:
  const LatencyModel& model(const ContextSplit& split, Recompute mode) const;
  bool measured(Recompute mode) const { return measured_[static_cast<int>(mode)]; }
  /// Times of `mode` from its series, else from that of fallback_ without what that recomputes;
  /// `selective_s`: what selective recompute adds to backward.
  PassTime pass(const LayerTime& time, Recompute mode, double selective_s) const;

  std::string name_;
  PatternKind pattern_;
  ProfileTable table_;
  WorkShape work_;
  RateCosts rates_;
  double weight_share_ = 0.5;
  bool measured_[3] = {false, false, false};  ///< by Recompute
  Recompute fallback_ = Recompute::none;      ///< whose series stands in for those not measured
  mutable std::mutex mutex_;
  mutable std::map<std::tuple<int, int, Recompute>, std::unique_ptr<LatencyModel>> models_;
};

}  // namespace ballast
