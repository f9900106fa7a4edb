#include "core/model/model_shape.hpp"

namespace ballast {
namespace {

// Weights of the matrix products of one layer; norms and biases are no products.
std::int64_t layer_products(const ModelShape& s) {
  const std::int64_t q = s.query_heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  return s.hidden * (q + 2 * kv) + q * s.hidden + 3 * s.hidden * s.intermediate;
}

}  // namespace

std::int64_t ModelShape::parameters_without_embedding() const {
  const std::int64_t biases = qkv_bias ? (query_heads + 2 * kv_heads) * head_dim : 0;
  const std::int64_t head_norms = qk_norm ? 2 * head_dim : 0;
  return layers * (layer_products(*this) + biases + head_norms + 2 * hidden) + hidden;
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
  need(!(s.qkv_bias && s.qk_norm), {"model.qkv_bias", "model.qk_norm"},
       "qkv_bias and qk_norm exclude each other; no model has both", "set one of them to false");
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

}  // namespace ballast
