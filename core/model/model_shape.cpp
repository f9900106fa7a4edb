#include "core/model/model_shape.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.hpp"

namespace ballast {
namespace {

// Shapes as published in the models' config.json files.
ModelShape qwen(const char* name, std::int64_t layers, std::int64_t hidden,
                std::int64_t query_heads, std::int64_t kv_heads, std::int64_t head_dim,
                std::int64_t intermediate, std::int64_t vocabulary, bool tied) {
  ModelShape s;
  s.preset = name;
  s.layers = layers;
  s.hidden = hidden;
  s.query_heads = query_heads;
  s.kv_heads = kv_heads;
  s.head_dim = head_dim;
  s.intermediate = intermediate;
  s.vocabulary = vocabulary;
  s.qkv_bias = true;
  s.tied_embedding = tied;
  s.rms_eps = 1e-6;
  s.rope_theta = 1e6;
  s.original_context = 32768;
  return s;
}

ModelShape llama31_8b() {
  ModelShape s;
  s.preset = "llama3.1-8b";
  s.layers = 32;
  s.hidden = 4096;
  s.query_heads = 32;
  s.kv_heads = 8;
  s.head_dim = 128;
  s.intermediate = 14336;
  s.vocabulary = 128256;
  s.rms_eps = 1e-5;
  s.rope_theta = 5e5;
  s.original_context = 8192;
  s.llama3_factor = 8.0;
  s.llama3_low = 1.0;
  s.llama3_high = 4.0;
  return s;
}

const std::vector<ModelShape>& presets() {
  static const std::vector<ModelShape> list = {
      qwen("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, true),
      qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, true),
      qwen("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, true),
      qwen("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, false),
      llama31_8b(),
  };
  return list;
}

// Weights of the matrix products of one layer; norms and biases are no products.
std::int64_t layer_products(const ModelShape& s) {
  const std::int64_t q = s.query_heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  return s.hidden * (q + 2 * kv) + q * s.hidden + 3 * s.hidden * s.intermediate;
}

}  // namespace

std::int64_t ModelShape::parameters_without_embedding() const {
  const std::int64_t biases = qkv_bias ? (query_heads + 2 * kv_heads) * head_dim : 0;
  return layers * (layer_products(*this) + biases + 2 * hidden) + hidden;
}

std::int64_t ModelShape::parameters() const {
  return parameters_without_embedding() + (tied_embedding ? 1 : 2) * vocabulary * hidden;
}

double ModelShape::training_flops(double tokens, double attention_pairs) const {
  const double products = static_cast<double>(layers) * static_cast<double>(layer_products(*this)) +
                          static_cast<double>(vocabulary * hidden);
  return (lora.enabled() ? 4.0 : 6.0) * products * tokens +
         12.0 * static_cast<double>(layers * query_heads * head_dim) * attention_pairs;
}

ModelShape model_preset(const std::string& name) {
  for (const ModelShape& shape : presets())
    if (shape.preset == name) return shape;
  fail("model preset \"{}\" is unknown; choose one of: {}, or give an explicit shape", name,
       fmt::join(model_presets(), ", "));
}

const std::vector<std::string>& model_presets() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const ModelShape& shape : presets()) list.push_back(shape.preset);
    return list;
  }();
  return names;
}

std::vector<Problem> problems(const ModelShape& s) {
  std::vector<Problem> list;
  const auto positive = [&](const char* what, std::int64_t value) {
    if (value < 1)
      list.push_back(
          {{std::string("model.") + what}, fmt::format("{} = {} must be at least 1", what, value)});
  };
  const auto need = [&](bool sound, std::vector<Key> keys, std::string text,
                        std::string remedy = "") {
    if (!sound) list.push_back({std::move(keys), std::move(text), std::move(remedy)});
  };
  positive("layers", s.layers);
  positive("hidden", s.hidden);
  positive("intermediate", s.intermediate);
  positive("query_heads", s.query_heads);
  positive("kv_heads", s.kv_heads);
  positive("head_dim", s.head_dim);
  positive("vocabulary", s.vocabulary);
  positive("original_context", s.original_context);
  need(s.kv_heads <= 0 || s.query_heads <= 0 || s.query_heads % s.kv_heads == 0,
       {"model.query_heads", "model.kv_heads"},
       fmt::format("query_heads = {} is not a multiple of kv_heads = {}", s.query_heads,
                   s.kv_heads));
  need(s.head_dim <= 0 || s.head_dim % 2 == 0, {"model.head_dim"},
       fmt::format("head_dim = {} is odd; rotary embedding turns pairs", s.head_dim));
  need(s.rms_eps > 0, {"model.rms_eps"}, fmt::format("rms_eps = {} must be above 0", s.rms_eps));
  need(s.initial_std > 0, {"model.initial_std"},
       fmt::format("initial_std = {} must be above 0", s.initial_std));
  need(s.rope_theta > 1, {"model.rope_theta"},
       fmt::format("rope_theta = {} must be above 1", s.rope_theta));
  need(s.yarn_factor >= 1, {"model.yarn_factor"},
       fmt::format("yarn_factor = {} must be at least 1 (1 is plain RoPE)", s.yarn_factor));
  need(s.llama3_factor >= 1, {"model.llama3_factor"},
       fmt::format("llama3_factor = {} must be at least 1 (1 is plain RoPE)", s.llama3_factor));
  need(!(s.yarn_factor > 1 && s.llama3_factor > 1), {"model.yarn_factor", "model.llama3_factor"},
       fmt::format("yarn_factor = {} and llama3_factor = {} exclude each other", s.yarn_factor,
                   s.llama3_factor),
       "set one of them to 1");
  need(s.llama3_factor <= 1 || (s.llama3_low > 0 && s.llama3_high > s.llama3_low),
       {"model.llama3_low", "model.llama3_high"},
       fmt::format("llama3_low = {} and llama3_high = {} must satisfy 0 < low < high", s.llama3_low,
                   s.llama3_high));
  return list;
}

namespace {

/// Freezes the table and adds the adapters of its matrices.
void add_adapters(const LoraOptions& lora, std::vector<Parameter>& table) {
  for (Parameter& p : table) p.trainable = false;
  const std::size_t frozen = table.size();
  for (std::size_t i = 0; i < frozen; ++i) {
    const std::string suffix = ".weight", name = table[i].name;
    for (const Projection projection : lora_projections()) {
      if (std::find(lora.projections.begin(), lora.projections.end(), projection) ==
              lora.projections.end() ||
          !name.ends_with(lora_module(projection) + suffix))
        continue;
      Parameter adapter = table[i];
      adapter.trainable = true;
      adapter.tp_dim = -1;
      adapter.name = name.substr(0, name.size() - suffix.size()) + ".lora_A.weight";
      adapter.shape = {lora.rank, table[i].shape[1]};
      adapter.initial_std =
          1 /
          std::sqrt(3 * static_cast<double>(
                            table[i].shape[1]));  // the variance that PEFT's uniform values have
      table.push_back(adapter);
      adapter.name = name.substr(0, name.size() - suffix.size()) + ".lora_B.weight";
      adapter.shape = {table[i].shape[0], lora.rank};
      adapter.initialiser = Initialiser::zeros;
      table.push_back(adapter);
    }
  }
}

}  // namespace

std::int64_t Parameter::numel() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<Parameter> parameter_table(const ModelShape& s,
                                       const std::vector<std::int64_t>& layer_begin) {
  require(!layer_begin.empty() && layer_begin.front() == 0,
          "the parameter table needs the first layer of every stage, beginning with 0");
  for (std::size_t i = 1; i < layer_begin.size(); ++i)
    require(layer_begin[i] > layer_begin[i - 1] && layer_begin[i] < s.layers,
            "stage {} begins at layer {}: stages must ascend, below {} layers", i, layer_begin[i],
            s.layers);
  const int last_stage = static_cast<int>(layer_begin.size()) - 1;
  const std::int64_t q = s.query_heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  // Projections that write to the residual stream start smaller, so that its variance does not grow
  // with depth (GPT-2).
  const double output_std = s.initial_std / std::sqrt(2.0 * static_cast<double>(s.layers));
  std::vector<Parameter> table;
  int stage = 0, layer = -1;
  const auto matrix = [&](const std::string& name, std::int64_t out, std::int64_t in, int tp_dim,
                          double std = -1) {
    Parameter p;
    p.name = name;
    p.shape = {out, in};
    p.initial_std = std < 0 ? s.initial_std : std;
    p.stage = stage;
    p.layer = layer;
    p.tp_dim = tp_dim;
    table.push_back(p);
  };
  const auto vector = [&](const std::string& name, std::int64_t n, Initialiser initialiser,
                          int tp_dim) {
    Parameter p;
    p.name = name;
    p.shape = {n};
    p.initialiser = initialiser;
    p.initial_std = 0.0;
    p.weight_decay = false;
    p.stage = stage;
    p.layer = layer;
    p.tp_dim = tp_dim;
    table.push_back(p);
  };
  matrix("model.embed_tokens.weight", s.vocabulary, s.hidden, 0);
  for (layer = 0; layer < s.layers; ++layer) {
    while (stage < last_stage && layer >= layer_begin[static_cast<std::size_t>(stage) + 1]) ++stage;
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    vector(prefix + "input_layernorm.weight", s.hidden, Initialiser::ones, -1);
    matrix(prefix + "self_attn.q_proj.weight", q, s.hidden, 0);
    matrix(prefix + "self_attn.k_proj.weight", kv, s.hidden, 0);
    matrix(prefix + "self_attn.v_proj.weight", kv, s.hidden, 0);
    if (s.qkv_bias) {
      vector(prefix + "self_attn.q_proj.bias", q, Initialiser::zeros, 0);
      vector(prefix + "self_attn.k_proj.bias", kv, Initialiser::zeros, 0);
      vector(prefix + "self_attn.v_proj.bias", kv, Initialiser::zeros, 0);
    }
    matrix(prefix + "self_attn.o_proj.weight", s.hidden, q, 1, output_std);
    vector(prefix + "post_attention_layernorm.weight", s.hidden, Initialiser::ones, -1);
    matrix(prefix + "mlp.gate_proj.weight", s.intermediate, s.hidden, 0);
    matrix(prefix + "mlp.up_proj.weight", s.intermediate, s.hidden, 0);
    matrix(prefix + "mlp.down_proj.weight", s.hidden, s.intermediate, 1, output_std);
  }
  stage = last_stage;
  layer = -1;
  vector("model.norm.weight", s.hidden, Initialiser::ones, -1);
  if (!s.tied_embedding) {
    matrix("lm_head.weight", s.vocabulary, s.hidden, 0);
  } else if (last_stage > 0) {
    // The head of a tied model on another stage than the embedding: same name, hence the same
    // initial values.
    matrix("model.embed_tokens.weight", s.vocabulary, s.hidden, 0);
    table.back().tied_copy = true;
  }
  if (s.lora.enabled()) add_adapters(s.lora, table);
  return table;
}

}  // namespace ballast
