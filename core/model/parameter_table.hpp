// The parameter table: the one list of a model's parameters.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/model/model_shape.hpp"

namespace ballast {

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
