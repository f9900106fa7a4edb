#include "core/model/presets.hpp"

#include "core/base/error.hpp"

namespace ballast {
namespace {

/// What the Qwen2.5 models share.
ModelShape qwen(ModelShape shape) {
  shape.qkv_bias = true;
  shape.rms_eps = 1e-6;
  shape.rope_theta = 1e6;
  shape.original_context = 32768;
  return shape;
}

/// What the dense Qwen3 models share.
ModelShape qwen3(const char* name, std::int64_t layers, std::int64_t hidden,
                 std::int64_t intermediate, std::int64_t query_heads, bool tied_embedding) {
  return {.preset = name,
          .layers = layers,
          .hidden = hidden,
          .intermediate = intermediate,
          .query_heads = query_heads,
          .kv_heads = 8,
          .head_dim = 128,
          .vocabulary = 151936,
          .qk_norm = true,
          .tied_embedding = tied_embedding,
          .rms_eps = 1e-6,
          .rope_theta = 1e6,
          .original_context = 32768};  // YaRN's, by the models' cards; 8,192 more are for answers
}

/// Shapes as published in the models' config.json files.
const std::vector<ModelShape>& presets() {
  static const std::vector<ModelShape> list = {
      qwen({.preset = "qwen2.5-0.5b",
            .layers = 24,
            .hidden = 896,
            .intermediate = 4864,
            .query_heads = 14,
            .kv_heads = 2,
            .head_dim = 64,
            .vocabulary = 151936,
            .tied_embedding = true}),
      qwen({.preset = "qwen2.5-1.5b",
            .layers = 28,
            .hidden = 1536,
            .intermediate = 8960,
            .query_heads = 12,
            .kv_heads = 2,
            .head_dim = 128,
            .vocabulary = 151936,
            .tied_embedding = true}),
      qwen({.preset = "qwen2.5-3b",
            .layers = 36,
            .hidden = 2048,
            .intermediate = 11008,
            .query_heads = 16,
            .kv_heads = 2,
            .head_dim = 128,
            .vocabulary = 151936,
            .tied_embedding = true}),
      qwen({.preset = "qwen2.5-7b",
            .layers = 28,
            .hidden = 3584,
            .intermediate = 18944,
            .query_heads = 28,
            .kv_heads = 4,
            .head_dim = 128,
            .vocabulary = 152064,
            .tied_embedding = false}),
      qwen3("qwen3-0.6b", 28, 1024, 3072, 16, true),
      qwen3("qwen3-1.7b", 28, 2048, 6144, 16, true),
      qwen3("qwen3-4b", 36, 2560, 9728, 32, true),
      qwen3("qwen3-8b", 36, 4096, 12288, 32, false),
      qwen3("qwen3-14b", 40, 5120, 17408, 40, false),
      {.preset = "llama3.1-8b",
       .layers = 32,
       .hidden = 4096,
       .intermediate = 14336,
       .query_heads = 32,
       .kv_heads = 8,
       .head_dim = 128,
       .vocabulary = 128256,
       .rms_eps = 1e-5,
       .rope_theta = 5e5,
       .original_context = 8192,
       .llama3_factor = 8.0,
       .llama3_low = 1.0,
       .llama3_high = 4.0},
  };
  return list;
}

}  // namespace

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

}  // namespace ballast
