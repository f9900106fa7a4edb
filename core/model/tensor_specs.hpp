// The tensors that the layers of a model allocate, by name and size: the one list that allocators
// (kernels/model) and the memory model (core/predict/memory_replay) read.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/recompute_options.hpp"

namespace ballast {

/// How much of a layer's forward is kept for its backward.
enum class Keep {
  nothing,    ///< evaluation
  input,      ///< the layer's input alone; backward runs the whole forward again
  selective,  ///< matrix products and attention; norms and the SwiGLU product run again
  all,
};
inline Keep keep_of(Recompute mode) {
  return mode == Recompute::none        ? Keep::all
         : mode == Recompute::selective ? Keep::selective
                                        : Keep::input;
}

/// dtype of statistics (rstd, LSE, token losses, rotation table), gradients and partial sums beside
/// values of `type`.
inline DType statistics_type(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

/// Widths of one token's queries, of its keys (or values), and of q, k and v side by side.
std::int64_t query_width(const ModelShape& shape);
std::int64_t kv_width(const ModelShape& shape);
std::int64_t qkv_width(const ModelShape& shape);

/// One intermediate result of a layer's forward over t tokens.
struct ActivationSpec {
  const char* name;
  Keep kept_from;  ///< the least Keep that keeps it
  Shape shape;
  bool statistic;
  bool weight_input;  ///< what a weight gradient is made from
  std::int64_t bytes(DType type) const;
};
/// input, rstd1, normed1, qkv, turned (no columns without QK-norm), attention, lse, middle, rstd2,
/// normed2, gate_up, product.
std::vector<ActivationSpec> layer_activations(const ModelShape& shape, std::int64_t tokens);

/// Scratch of a layer's passes, shared by all layers, [tokens, columns] of the activations' type
/// or, where `statistic`, of the statistics'.
enum class LayerScratch {
  branch,
  d_product,
  d_normed,
  d_gate_up,
  d_attention,
  dq,
  dk,
  dv,
  d_qkv,
  product,  ///< the activation of that name, where backward makes it again
};
struct ScratchSpec {
  const char* name;
  std::int64_t columns;
  bool kept_between_halves;  ///< what backward_weight needs: then a tensor of its own
  bool statistic = false;
  bool backward = false;  ///< of the backward alone
};
ScratchSpec layer_scratch(const ModelShape& shape, LayerScratch which);
inline constexpr int kLayerScratch = 9;  ///< those but for `product`
/// Scratch of adapters; empty without.
std::vector<ScratchSpec> adapter_scratch(const ModelShape& shape);
/// Scratch of the LM head over a chunk of tokens: hidden, normed, rstd, logits, lse.
std::vector<ScratchSpec> head_scratch(const ModelShape& shape);

/// Key columns of the host attention's score tiles, of which `stacked_heads` heads' rows share one:
/// wide enough for good matrix products, small enough to stay in a core's cache.
std::int64_t attention_tile_columns(std::int64_t stacked_heads, std::int64_t element_bytes);
/// All tiles of a pass of it over one range of keys.
std::int64_t attention_tile_bytes(std::int64_t stacked_heads, std::int64_t head_dim,
                                  std::int64_t element_bytes, bool backward);

/// Bytes of a layer's activations that `keep` names; and held between the halves of its backward:
/// the inputs of its weights and the gradients of its products' outputs.
std::int64_t kept_bytes(const ModelShape& shape, std::int64_t tokens, DType type, Keep keep);
std::int64_t between_halves_bytes(const ModelShape& shape, std::int64_t tokens, DType type);

}  // namespace ballast
