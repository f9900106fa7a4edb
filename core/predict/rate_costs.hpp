// Costs from the FLOPs and bytes of the model and the rates of a kind of device: what a plan starts
// from where a deck names neither a profile table nor costs.
#pragma once
#include <cstdint>
#include <string>

#include "core/model/model_shape.hpp"
#include "core/predict/costs.hpp"

namespace ballast {

/// What one device sustains, per second.
struct DeviceRates {
  const char* name;
  double matmul_flops, fp8_flops, attention_forward_flops, attention_backward_flops;
  double memory_bytes;               ///< streaming kernels: norms, activations, optimizer
  double node_bytes, network_bytes;  ///< one direction, to a rank of the same and of another node
  double node_latency_s, network_latency_s;
  double host_bytes;  ///< to pinned host memory
  double launch_s;    ///< beside the above, for each of a layer's kernels
};

enum class DeviceKind { host_core, a100, h100, h200, generic };
const DeviceRates& device_rates(DeviceKind kind);
/// By the hardware's own description: "NVIDIA H200", "AMD EPYC ..."; generic where it is unknown.
DeviceKind device_kind(const std::string& description);

/// What the FLOPs and bytes are of.
struct WorkShape {
  ModelShape model;
  bool fp8 = false;                            ///< layers' matrices multiply in FP8
  std::int64_t element_bytes = 2;              ///< of activations and parameter values
  std::int64_t moment_bytes = 4;               ///< of each of the optimizer's moments
  bool bf16_gradients = false;                 ///< as they are kept and travel
  std::int64_t block_tokens = 64;              ///< tokens of the key blocks that budgets count
  std::shared_ptr<const PatternWork> pattern;  ///< Costs::pattern
};

class RateCosts final : public Costs {
 public:
  RateCosts(const DeviceRates& rates, const WorkShape& work);
  std::string source() const override;
  PassTime rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const override;
  PassTime head(std::int64_t tokens, const ContextSplit& split) const override;
  PassTime attention(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                     const ContextSplit& split, Recompute mode) const override;
  const PatternWork* pattern() const override { return work_.pattern.get(); }
  double exchange(std::int64_t tokens, const ContextSplit& split, Link link) const override;
  double ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel level, bool gradients,
                  Link link) const override;
  double ring_sums(std::int64_t tokens, const ContextSplit& split, bool gradients) const override;
  double stage_hop(std::int64_t tokens, const ContextSplit& split, Link link) const override;
  double host_copy(std::int64_t tokens, const ContextSplit& split) const override;
  double reduce(const Collective& sum) const override;
  double gather(const Collective& all) const override;
  double optimizer(std::int64_t elements, bool full_gradients) const override;
  double products(double flops) const override { return flops / rates_.matmul_flops; }

 private:
  double transfer(double bytes, Link link) const;
  double collective(const Collective& of, double bytes, double passes) const;

  DeviceRates rates_;
  WorkShape work_;
  double rest_flops_ = 0, head_flops_ = 0;  ///< of one token, forward
  double rest_bytes_ = 0, head_bytes_ = 0;
  double round_forward_bytes_ = 0, round_backward_bytes_ = 0;  ///< FP8, of one token
  double weight_share_ = 0.5;
};

}  // namespace ballast
