#include "core/predict/layer_clock.hpp"

#include <vector>

#include "core/base/hash.hpp"
#include "core/plan/context/layout_balance.hpp"

namespace ballast {

PassParts& PassParts::add(const PassParts& other, double times) {
  compute_s += times * other.compute_s;
  recompute_s += times * other.recompute_s;
  ring_s += times * other.ring_s;
  exchange_s += times * other.exchange_s;
  return *this;
}

std::uint64_t shape_hash(const PlannedMicroBatch& m) {
  Hash hash;
  for (const Segment& s : m.segments) hash.add(s.begin).add(s.end);
  hash.add(m.segments.size()).add(m.layout).add(m.align).add(m.recompute_layers);
  hash.add(m.split.sp).add(m.split.ring_outer).add(m.split.ring_inner);
  hash.add(m.tuning.base_budget).add(m.tuning.anchor_budget).add(m.tuning.above_anchor);
  return hash.value();
}

double LayerClock::uneven(const PlannedMicroBatch& m) {
  if (m.split.ring() == 1) return 1;
  const auto [at, fresh] = uneven_.try_emplace(shape_hash(m), 1.0);
  if (!fresh) return at->second;
  const MicroBatch micro_batch = m.micro_batch();
  const SequenceLayout layout = plan_.layout(m);
  const PatternWork* sparse = costs_.pattern();
  at->second = sparse ? sparse->uneven(micro_batch, layout, m.split.ring_outer, m.split.ring_inner)
                      : balance(micro_batch, layout).cost(0);
  return at->second;
}

const RingPlan& LayerClock::ring(const ContextSplit& split) {
  const auto [at, fresh] = rings_.try_emplace({split.ring_outer, split.ring_inner});
  if (fresh) at->second = plan_ring(0, split.ring_outer, split.ring_inner);
  return at->second;
}

LayerParts LayerClock::layer(const PlannedMicroBatch& m, std::int64_t budget, Recompute mode) {
  const std::int64_t tokens = m.axis_tokens();
  PassTime attention;
  for (const Segment& s : m.segments)
    attention += costs_.attention(s.tokens(), s.begin, budget, m.split, mode);
  PassTime all = costs_.rest(tokens, m.split, mode);
  all += attention;
  LayerParts parts;
  parts.weight_s = all.weight_s;
  parts.forward.compute_s = all.forward_s;
  parts.backward.compute_s = all.backward_s - all.recompute_s;
  parts.backward.recompute_s = all.recompute_s;
  const double again = mode == Recompute::full ? 1 : 0;
  parts.forward.exchange_s = costs_.exchange(tokens, m.split, exchange_link(plan_.mesh, m.split));
  parts.backward.exchange_s = (1 + again) * parts.forward.exchange_s;
  const int ranks = m.split.ring();
  if (ranks == 1 || tokens == 0) return parts;

  // Uneven parts are those of all visible pairs or of a known pattern; a budget evens them out.
  const double uneven = budget == 0 ? this->uneven(m) : 1;
  const RingPlan& plan = ring(m.split);
  const auto hop = [&](RingLevel level, bool gradients) {
    return costs_.ring_hop(tokens, m.split, level, gradients,
                           ring_link(plan_.mesh, m.split, level));
  };
  const auto pass = [&](const std::vector<RingStep>& steps, double seconds, bool gradients) {
    RingCosts ring;
    ring.compute_s = uneven * seconds / ranks;
    ring.inner_hop_s = hop(RingLevel::inner, false);
    ring.outer_hop_s = hop(RingLevel::outer, false);
    if (gradients) {
      ring.inner_dkv_hop_s = hop(RingLevel::inner, true);
      ring.outer_dkv_hop_s = hop(RingLevel::outer, true);
    }
    return simulate(steps, ring) - seconds;
  };
  parts.forward.ring_s =
      pass(plan.forward, attention.forward_s, false) + costs_.ring_sums(tokens, m.split, false);
  parts.backward.ring_s = pass(plan.backward, attention.backward_s - attention.recompute_s, true) +
                          costs_.ring_sums(tokens, m.split, true) + again * parts.forward.ring_s;
  return parts;
}

}  // namespace ballast
