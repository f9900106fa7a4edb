// Low-rank adapters (LoRA: Hu et al., ICLR 2022): y = W x + alpha / rank B A dropout(x), with W
// frozen and A [rank, in], B [out, rank] trained.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

struct LoraOptions {
  std::int64_t rank = 0;  ///< 0: no adapters, every weight is trained
  double alpha = 16;
  double dropout = 0;  ///< of the adapters' inputs, in training
  std::vector<std::string> projections = {"q", "k", "v", "o"};
  std::uint64_t seed = 0;  ///< of dropout
  bool enabled() const { return rank > 0; }
  double scale() const { return alpha / static_cast<double>(rank); }
  bool operator==(const LoraOptions&) const = default;
};

/// What can have an adapter, in the order of the parameter table: q k v o gate up down.
const std::vector<std::string>& lora_projections();
/// Its module inside a layer, as in Hugging Face: q -> self_attn.q_proj, down -> mlp.down_proj.
/// Error for an unknown one.
std::string lora_module(const std::string& projection);
/// What is wrong, one sentence each, beginning with the deck key at fault.
std::vector<std::string> problems(const LoraOptions& options);

}  // namespace ballast
