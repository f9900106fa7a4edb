// ModelShape: a decoder-only Transformer as in Qwen2.5 and Llama 3, and its parameter table.
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
  LoraOptions lora;  ///< adapters beside the weights, which are frozen then

  std::int64_t parameters() const;  ///< tied weights once, adapters not counted
  std::int64_t parameters_without_embedding() const;
  /// Model FLOPs of one training pass (forward + backward = 3 x forward) over `tokens` tokens whose
  /// segments have `attention_pairs` visible pairs: 6 per weight of every matrix product (head
  /// included, embedding look-up not) and 12 D per pair and query head.  With adapters 4 per frozen
  /// weight, whose own gradient nobody asks for; the adapters are not counted.
  double training_flops(double tokens, double attention_pairs) const;
};

/// qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, llama3.1-8b, with the published shapes.
/// Throws Error otherwise.
ModelShape model_preset(const std::string& name);
const std::vector<std::string>& model_presets();

/// Problems of a shape (heads that do not divide, odd head dim ...), whose texts begin with the
/// field's name.
std::vector<Problem> problems(const ModelShape& shape);

enum class Initialiser { zeros, ones, normal };

/// One row of the parameter table: the one list that initialisation, optimizer, checkpoint,
/// safetensors and LoRA read.
struct Parameter {
  std::string name;  ///< Hugging Face name, e.g. model.layers.0.self_attn.q_proj.weight
  std::vector<std::int64_t>
      shape;  ///< full logical shape; matrices are [out, in] as in Hugging Face
  Initialiser initialiser = Initialiser::normal;
  double initial_std = 0.02;
  bool weight_decay = true;
  bool trainable = true;
  int stage = 0;           ///< pipeline stage that owns it
  int layer = -1;          ///< transformer layer, -1 for embedding, final norm and head
  int tp_dim = -1;         ///< dimension split under tensor parallelism, -1: replicated
  bool tied_copy = false;  ///< second copy of a tied embedding on the last stage; gradients of both
                           ///< copies are summed
  std::int64_t numel() const;
};

/// All parameters in the order embedding, layers, final norm, head; q, k, v (and gate, up) weights
/// are neighbours, so that they form one matrix product when stored back to back.  `layer_begin[s]`
/// is the first layer of stage s.  With lora.rank > 0 none of them is trainable, and the adapters
/// follow: of each layer, in the order of lora_projections(), MODULE.lora_A.weight [rank, in] and
/// MODULE.lora_B.weight [out, rank], which begins at 0.
std::vector<Parameter> parameter_table(const ModelShape& shape,
                                       const std::vector<std::int64_t>& layer_begin = {0});

}  // namespace ballast
