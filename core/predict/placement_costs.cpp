#include "core/predict/placement_costs.hpp"

#include <algorithm>

namespace ballast {

StepPlacementCosts::StepPlacementCosts(const Costs& costs, const PlacedWork& work)
    : costs_(costs), work_(work) {
  const std::int64_t stage = std::max<std::int64_t>(1, work.layers / std::max(1, work.mesh.pp)),
                     all = work.recompute.mode == Recompute::none ? 0 : stage,
                     recomputed = work.recompute.layers >= 0
                                      ? std::min<std::int64_t>(work.recompute.layers, all)
                                      : all;
  const double scale = costs_.layer_scale(stage);
  kept_ = scale * static_cast<double>(stage - recomputed);
  recomputed_ = scale * static_cast<double>(recomputed);
}

ContextSplit StepPlacementCosts::context(const PlacementSplit& split) const {
  return context_split(work_.mesh, split.sp, split.ring);
}

double StepPlacementCosts::rest_s(std::int64_t tokens, const PlacementSplit& split) const {
  if (tokens == 0) return 0;
  const ContextSplit at = context(split);
  double sum = costs_.head(tokens, at).total_s() / work_.mesh.pp;
  if (kept_ > 0) sum += kept_ * costs_.rest(tokens, at, Recompute::none).total_s();
  if (recomputed_ > 0) sum += recomputed_ * costs_.rest(tokens, at, work_.recompute.mode).total_s();
  return sum;
}

double StepPlacementCosts::attention_s(std::int64_t query_tokens, std::int64_t prefix_tokens,
                                       const PlacementSplit& split) const {
  if (query_tokens == 0) return 0;
  const ContextSplit at = context(split);
  const auto layer = [&](Recompute mode) {
    return costs_.attention(query_tokens, prefix_tokens, work_.budget, at, mode).total_s();
  };
  return (kept_ > 0 ? kept_ * layer(Recompute::none) : 0) +
         (recomputed_ > 0 ? recomputed_ * layer(work_.recompute.mode) : 0);
}

double StepPlacementCosts::transfer_s(std::int64_t tokens, double attention_s,
                                      const PlacementSplit& split) const {
  if (tokens == 0) return 0;
  const ContextSplit at = context(split);
  const double layers = kept_ + recomputed_,
               again = work_.recompute.mode == Recompute::full ? recomputed_ : 0;
  double sum = (2 * layers + again) * costs_.exchange(tokens, at, exchange_link(work_.mesh, at));
  if (split.ring > 1) {
    // All hops of the slower level; those that attention does not hide are waited for.
    const RingLevel level = at.ring_outer > 1 ? RingLevel::outer : RingLevel::inner;
    const Link link = ring_link(work_.mesh, at, level);
    const double hops = (2 * layers + again) * costs_.ring_hop(tokens, at, level, false, link) +
                        layers * costs_.ring_hop(tokens, at, level, true, link);
    sum += std::max(0.0, (split.ring - 1) * (hops - attention_s / split.ring));
  }
  return sum;
}

double StepPlacementCosts::bytes(std::int64_t tokens, std::int64_t, const PlacementSplit& s) const {
  return static_cast<double>((tokens + s.ranks - 1) / s.ranks);
}

}  // namespace ballast
