#include "core/predict/stated_costs.hpp"

#include <numeric>
#include <utility>

namespace ballast {

std::string StatedCosts::source() const {
  return times_.given ? "stated costs" : "no costs stated: 1 us a token";
}

PassTime StatedCosts::rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const {
  if (tokens <= 0) return {};
  const double products = times_.token_s * static_cast<double>(tokens) / split.ranks();
  PassTime time;
  time.forward_s = times_.micro_batch_s + products;
  time.weight_s = times_.backward_over_forward * times_.weight_share * products;
  time.recompute_s = mode == Recompute::full ? time.forward_s : 0;
  time.backward_s = times_.backward_over_forward * time.forward_s + time.recompute_s;
  return time;
}

PassTime StatedCosts::attention(std::int64_t query_tokens, std::int64_t prefix_tokens,
                                std::int64_t budget, const ContextSplit& split,
                                Recompute mode) const {
  PassTime time;
  time.forward_s =
      times_.pair_s * static_cast<double>(query_tokens) *
      computed_keys(query_tokens, prefix_tokens, budget, times_.block_tokens, pattern()) /
      split.ranks();
  time.recompute_s = mode == Recompute::full ? time.forward_s : 0;
  time.backward_s = times_.backward_over_forward * time.forward_s + time.recompute_s;
  return time;
}

double StatedCosts::exchange(std::int64_t tokens, const ContextSplit& split, Link) const {
  if (split.sp == 1) return 0;
  const auto [query, kv] = std::pair(times_.query_heads, times_.kv_heads);
  const double repeats = kv > 0
                             ? static_cast<double>(query + std::lcm<std::int64_t>(kv, split.sp)) /
                                   static_cast<double>(query + kv)
                             : 1;
  // Both passes of all layers of a stage share the stated time.
  return times_.exchange_token_s * repeats * static_cast<double>(tokens) * (1 - 1.0 / split.sp) /
         split.ranks() / 2;
}

double StatedCosts::ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel,
                             bool gradients, Link) const {
  if (split.ring() == 1) return 0;
  // Keys and values go round in both passes, their gradients, twice the bytes, in one.
  const double part = gradients ? 0.5 : 0.25;
  return part * times_.ring_hop_token_s * static_cast<double>(tokens) / split.ranks();
}

double StatedCosts::stage_hop(std::int64_t tokens, const ContextSplit& split, Link) const {
  return times_.stage_hop_token_s * static_cast<double>(tokens) / split.ranks();
}

}  // namespace ballast
