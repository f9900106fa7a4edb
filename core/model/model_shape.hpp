// ModelShape: a decoder-only Transformer as in Qwen2.5, Qwen3 and Llama 3.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/problem.hpp"
#include "core/model/lora_options.hpp"

namespace ballast {

struct ModelShape {
  std::string preset = "custom";
  std::int64_t layers = 0, hidden = 0, intermediate = 0;
  std::int64_t query_heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t vocabulary = 0;
  bool qkv_bias = false;
  bool qk_norm = false;  ///< RMSNorm of every head of q and k before rotation (Qwen3)
  bool tied_embedding = false;
  double rms_eps = 1e-6;
  double initial_std = 0.02;  ///< of the initial matrices; those that write to the residual stream
                              ///< begin with it over sqrt(2 layers)
  double rope_theta = 1e6;
  /// YaRN scaling factor; 1 is plain RoPE.  original_context in tokens is what the model was
  /// trained for.
  double yarn_factor = 1.0;
  std::int64_t original_context = 32768;
  /// Llama 3.1 frequency scaling ("llama3"): factor 1 is none.
  double llama3_factor = 1.0, llama3_low = 1.0, llama3_high = 4.0;
  LoraOptions lora = {};  ///< adapters beside the weights, which are frozen then

  std::int64_t parameters() const;  ///< tied weights once, adapters not counted
  std::int64_t parameters_without_embedding() const;
  /// Model FLOPs of one training pass (forward + backward = 3 x forward) over `tokens` tokens whose
  /// segments have `attention_pairs` visible pairs: 6 per weight of every matrix product (head
  /// included, embedding look-up not) and 12 D per pair and query head.  With adapters 4 per frozen
  /// weight, whose own gradient nobody asks for; the adapters are not counted.
  double training_flops(double tokens, double attention_pairs) const;
};

/// Problems of a shape (heads that do not divide, odd head dim ...), whose texts begin with the
/// field's name.
std::vector<Problem> problems(const ModelShape& shape);

}  // namespace ballast
