#include "core/model/parameter_table.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "core/base/error.hpp"

namespace ballast {
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

/// Adds rows to a table, each with the stage and layer that are current.
class TableBuilder {
 public:
  explicit TableBuilder(const ModelShape& shape)
      : shape_(shape),
        // Projections that write to the residual stream start smaller, so that its variance does
        // not grow with depth (GPT-2).
        output_std_(shape.initial_std / std::sqrt(2.0 * static_cast<double>(shape.layers))) {}

  int stage = 0, layer = -1;
  std::vector<Parameter> table;

  void embedding() { matrix("model.embed_tokens.weight", shape_.vocabulary, shape_.hidden, 0); }

  void transformer_layer() {
    const std::int64_t hidden = shape_.hidden, intermediate = shape_.intermediate;
    const std::int64_t q = shape_.query_heads * shape_.head_dim,
                       kv = shape_.kv_heads * shape_.head_dim;
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    vector(prefix + "input_layernorm.weight", hidden, Initialiser::ones, -1);
    matrix(prefix + "self_attn.q_proj.weight", q, hidden, 0);
    matrix(prefix + "self_attn.k_proj.weight", kv, hidden, 0);
    matrix(prefix + "self_attn.v_proj.weight", kv, hidden, 0);
    if (shape_.qkv_bias) {
      vector(prefix + "self_attn.q_proj.bias", q, Initialiser::zeros, 0);
      vector(prefix + "self_attn.k_proj.bias", kv, Initialiser::zeros, 0);
      vector(prefix + "self_attn.v_proj.bias", kv, Initialiser::zeros, 0);
    }
    if (shape_.qk_norm) {
      vector(prefix + "self_attn.q_norm.weight", shape_.head_dim, Initialiser::ones, -1);
      vector(prefix + "self_attn.k_norm.weight", shape_.head_dim, Initialiser::ones, -1);
    }
    matrix(prefix + "self_attn.o_proj.weight", hidden, q, 1, output_std_);
    vector(prefix + "post_attention_layernorm.weight", hidden, Initialiser::ones, -1);
    matrix(prefix + "mlp.gate_proj.weight", intermediate, hidden, 0);
    matrix(prefix + "mlp.up_proj.weight", intermediate, hidden, 0);
    matrix(prefix + "mlp.down_proj.weight", hidden, intermediate, 1, output_std_);
  }

  void head() {
    vector("model.norm.weight", shape_.hidden, Initialiser::ones, -1);
    if (!shape_.tied_embedding) {
      matrix("lm_head.weight", shape_.vocabulary, shape_.hidden, 0);
    } else if (stage > 0) {
      // The head of a tied model on another stage than the embedding: same name, hence the same
      // initial values.
      embedding();
      table.back().tied_copy = true;
    }
  }

 private:
  Parameter& add(const std::string& name, std::vector<std::int64_t> shape, int tp_dim) {
    Parameter& p = table.emplace_back();
    p.name = name;
    p.shape = std::move(shape);
    p.stage = stage;
    p.layer = layer;
    p.tp_dim = tp_dim;
    return p;
  }
  void matrix(const std::string& name, std::int64_t out, std::int64_t in, int tp_dim,
              std::optional<double> std = {}) {
    add(name, {out, in}, tp_dim).initial_std = std.value_or(shape_.initial_std);
  }
  void vector(const std::string& name, std::int64_t n, Initialiser initialiser, int tp_dim) {
    Parameter& p = add(name, {n}, tp_dim);
    p.initialiser = initialiser;
    p.initial_std = 0.0;
    p.weight_decay = false;
  }

  const ModelShape& shape_;
  double output_std_;
};

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
  TableBuilder builder(s);
  builder.embedding();
  for (builder.layer = 0; builder.layer < s.layers; ++builder.layer) {
    while (builder.stage < last_stage &&
           builder.layer >= layer_begin[static_cast<std::size_t>(builder.stage) + 1])
      ++builder.stage;
    builder.transformer_layer();
  }
  builder.stage = last_stage;
  builder.layer = -1;
  builder.head();
  if (s.lora.enabled()) add_adapters(s.lora, builder.table);
  return std::move(builder.table);
}

}  // namespace ballast
