#include "core/run_options.hpp"

#include <algorithm>

namespace ballast {

MeshShape mesh_shape(const Deck& deck) {
  const auto degree = [&](const char* path) { return static_cast<int>(deck.integer(path)); };
  MeshShape shape;
  shape.dp = degree("mesh.dp");
  shape.pp = degree("mesh.pp");
  shape.cp_outer = degree("mesh.cp_outer");
  shape.cp_inner = degree("mesh.cp_inner");
  shape.sp = degree("mesh.sp");
  shape.tp = degree("mesh.tp");
  shape.ranks_per_node = degree("mesh.ranks_per_node");
  return shape;
}

ModelShape model_shape(const Deck& given) {
  Deck deck = given;
  deck.apply_preset();
  const std::string& preset = deck.text("model.preset");
  const auto& known = model_presets();
  ModelShape shape;
  // What has no key, such as Llama 3.1's frequency scaling, comes from the preset alone.
  if (std::find(known.begin(), known.end(), preset) != known.end()) shape = model_preset(preset);
  shape.preset = preset;
  shape.layers = deck.integer("model.layers");
  shape.hidden = deck.integer("model.hidden");
  shape.intermediate = deck.integer("model.intermediate");
  shape.query_heads = deck.integer("model.query_heads");
  shape.kv_heads = deck.integer("model.kv_heads");
  shape.head_dim = deck.integer("model.head_dim");
  shape.vocabulary = deck.integer("model.vocabulary");
  shape.qkv_bias = deck.boolean("model.qkv_bias");
  shape.tied_embedding = deck.boolean("model.tied_embedding");
  shape.rms_eps = deck.real("model.rms_eps");
  shape.rope_theta = deck.real("model.rope_theta");
  shape.yarn_factor = deck.real("model.yarn_factor");
  shape.original_context = deck.integer("model.original_context");
  return shape;
}

double pair_cost_tokens(const ModelShape& shape) {
  if (shape.layers < 1) return 0;
  const double per_pair = 4.0 * static_cast<double>(shape.head_dim * shape.query_heads * shape.layers);
  const double per_token = 2.0 * static_cast<double>(shape.parameters_without_embedding() + shape.vocabulary * shape.hidden);
  return per_pair / per_token;
}

RunOptions RunOptions::from(const Deck& deck) {
  RunOptions options;
  options.mesh = mesh_shape(deck);
  options.model = model_shape(deck);
  options.batching.method = deck.text("batching.method");
  options.batching.micro_batch_tokens = deck.integer("batching.micro_batch_tokens");
  options.batching.dp = options.mesh.dp;
  options.batching.pair_cost_tokens = pair_cost_tokens(options.model);
  options.layout = layout_kind(deck.text("ring.layout"));
  options.stripe = deck.integer("ring.stripe");
  return options;
}

}  // namespace ballast
