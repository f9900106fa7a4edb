#include "core/model/tensor_specs.hpp"

#include <algorithm>

#include "core/model/parameter_table.hpp"

namespace ballast {

std::int64_t query_width(const ModelShape& s) { return s.query_heads * s.head_dim; }
std::int64_t kv_width(const ModelShape& s) { return s.kv_heads * s.head_dim; }
std::int64_t qkv_width(const ModelShape& s) { return query_width(s) + 2 * kv_width(s); }

std::int64_t ActivationSpec::bytes(DType type) const {
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) elements *= extent;
  return elements * static_cast<std::int64_t>(size_of(statistic ? statistics_type(type) : type));
}

std::vector<ActivationSpec> layer_activations(const ModelShape& s, std::int64_t t) {
  return {
      {"layer input", Keep::input, {t, s.hidden}, false, false},
      {"layer rstd1", Keep::selective, {t}, true, false},
      {"layer normed1", Keep::all, {t, s.hidden}, false, true},
      {"layer qkv", Keep::selective, {t, qkv_width(s)}, false, false},
      {"layer turned", Keep::all, {t, s.qk_norm ? query_width(s) + kv_width(s) : 0}, false, false},
      {"layer attention", Keep::selective, {t, query_width(s)}, false, true},
      {"layer lse", Keep::selective, {s.query_heads, t}, true, false},
      {"layer middle", Keep::selective, {t, s.hidden}, false, false},
      {"layer rstd2", Keep::selective, {t}, true, false},
      {"layer normed2", Keep::all, {t, s.hidden}, false, true},
      {"layer gate_up", Keep::selective, {t, 2 * s.intermediate}, false, false},
      {"layer product", Keep::all, {t, s.intermediate}, false, true},
  };
}

ScratchSpec layer_scratch(const ModelShape& s, LayerScratch which) {
  switch (which) {
    case LayerScratch::branch:
      return {"layer branch", s.hidden, false};
    case LayerScratch::product:
      return {"layer product", s.intermediate, false};
    case LayerScratch::d_product:
      return {"layer d_product", s.intermediate, false};
    case LayerScratch::d_normed:
      return {"layer d_normed", s.hidden, false};
    case LayerScratch::d_gate_up:
      return {"layer d_gate_up", 2 * s.intermediate, true};
    case LayerScratch::d_attention:
      return {"layer d_attention", query_width(s), false};
    case LayerScratch::dq:
      return {"layer dq", query_width(s), false, true};
    case LayerScratch::dk:
      return {"layer dk", kv_width(s), false, true};
    case LayerScratch::dv:
      return {"layer dv", kv_width(s), false, true};
    case LayerScratch::d_qkv:
      return {"layer d_qkv", qkv_width(s), true};
  }
  return {"", 0, false};
}

std::vector<ScratchSpec> adapter_scratch(const ModelShape& s) {
  if (!s.lora.enabled()) return {};
  ModelShape one = s;
  one.layers = 1;
  std::int64_t in = 0;
  for (const Parameter& p : parameter_table(one))
    if (p.name.ends_with("lora_A.weight")) in = std::max(in, p.shape[1]);
  std::vector<ScratchSpec> list{{"lora projected", s.lora.rank, false},
                                {"lora d_projected", s.lora.rank, false, false, true}};
  if (s.lora.dropout > 0) {
    list.push_back({"lora d_input", in, false, false, true});
    list.push_back({"lora dropped", in, false});
  }
  return list;
}

std::vector<ScratchSpec> head_scratch(const ModelShape& s) {
  return {{"head hidden", s.hidden, false},
          {"head normed", s.hidden, false},
          {"head rstd", 1, false, true},
          {"head logits", s.vocabulary, false},
          {"head lse", 1, false, true}};
}

std::int64_t attention_tile_columns(std::int64_t stacked_heads, std::int64_t element_bytes) {
  constexpr std::int64_t buffer_bytes = 256 * 1024, block = 64;
  const std::int64_t columns = buffer_bytes / element_bytes / (stacked_heads * block);
  return std::clamp(columns / block * block, block, 8 * block);
}

std::int64_t attention_tile_bytes(std::int64_t stacked_heads, std::int64_t head_dim,
                                  std::int64_t element_bytes, bool backward) {
  const auto padded = [](std::int64_t n) { return (n + 63) / 64 * 64; };
  const std::int64_t rows = stacked_heads * 64, dim = head_dim,
                     columns = attention_tile_columns(stacked_heads, element_bytes);
  return element_bytes * padded(backward ? 3 * padded(rows * dim) + 2 * padded(rows * columns) +
                                               3 * padded(columns * dim)
                                         : 2 * padded(rows * dim) + padded(rows * columns) +
                                               2 * padded(columns * dim) + 2 * padded(rows));
}

std::int64_t kept_bytes(const ModelShape& shape, std::int64_t tokens, DType type, Keep keep) {
  std::int64_t bytes = 0;
  for (const ActivationSpec& spec : layer_activations(shape, tokens))
    if (keep >= spec.kept_from) bytes += spec.bytes(type);
  return bytes;
}

std::int64_t between_halves_bytes(const ModelShape& shape, std::int64_t tokens, DType type) {
  std::int64_t bytes = 0;
  for (const ActivationSpec& spec : layer_activations(shape, tokens))
    if (spec.weight_input) bytes += spec.bytes(type);
  // Of qkv, gate_up, and of the outputs of attention and MLP.
  return bytes + tokens * (qkv_width(shape) + 2 * shape.hidden + 2 * shape.intermediate) *
                     static_cast<std::int64_t>(size_of(type));
}

}  // namespace ballast
