// Costs that a deck states (block costs): times of one token and one visible pair on one pipeline
// stage, all stages alike.  What is not stated costs nothing.
#pragma once
#include <cstdint>
#include <string>

#include "core/predict/costs.hpp"

namespace ballast {

struct StatedTimes {
  double token_s = 1e-6, pair_s = 0;  ///< forward, of one stage
  double micro_batch_s = 0;           ///< forward of a micro-batch on one stage beside them
  double backward_over_forward = 2;
  double weight_share = 0.5;  ///< of a token's backward: weight gradients
  double stage_hop_token_s = 0;
  double exchange_token_s = 0;  ///< of all layers, both passes, if a token went whole
  /// Of the model, where it is known: key/value heads that a group repeats are exchanged again.
  std::int64_t query_heads = 0, kv_heads = 0;
  double ring_hop_token_s = 0;  ///< of all layers, both passes, if its keys and values go one hop
  std::int64_t block_tokens = 64;              ///< tokens of the key blocks that budgets count
  std::shared_ptr<const PatternWork> pattern;  ///< Costs::pattern
  bool given = true;                           ///< false: nothing was stated, a token takes 1 us
};

class StatedCosts final : public Costs {
 public:
  explicit StatedCosts(const StatedTimes& times) : times_(times) {}
  std::string source() const override;
  PassTime rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const override;
  PassTime head(std::int64_t, const ContextSplit&) const override { return {}; }
  PassTime attention(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                     const ContextSplit& split, Recompute mode) const override;
  const PatternWork* pattern() const override { return times_.pattern.get(); }
  double layer_scale(std::int64_t stage_layers) const override {
    return 1 / static_cast<double>(stage_layers);
  }
  double exchange(std::int64_t tokens, const ContextSplit& split, Link link) const override;
  double ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel level, bool gradients,
                  Link link) const override;
  double stage_hop(std::int64_t tokens, const ContextSplit& split, Link link) const override;
  double host_copy(std::int64_t, const ContextSplit&) const override { return 0; }
  double reduce(const Collective&) const override { return 0; }
  double gather(const Collective&) const override { return 0; }
  double optimizer(std::int64_t, bool) const override { return 0; }

 private:
  StatedTimes times_;
};

}  // namespace ballast
