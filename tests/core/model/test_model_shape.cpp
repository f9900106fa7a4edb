// Model shapes against the published parameter counts, and the parameter table.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "core/base/error.hpp"
#include "core/model/parameter_table.hpp"
#include "core/model/presets.hpp"

namespace ballast {
namespace {

TEST(ModelShape, PresetsHaveThePublishedCounts) {
  const std::map<std::string, std::int64_t> published = {
      {"qwen2.5-0.5b", 494032768}, {"qwen2.5-1.5b", 1543714304}, {"qwen2.5-3b", 3085938688},
      {"qwen2.5-7b", 7615616512},  {"qwen3-0.6b", 596049920},    {"qwen3-1.7b", 1720574976},
      {"qwen3-4b", 4022468096},    {"qwen3-8b", 8190735360},     {"qwen3-14b", 14768307200},
      {"llama3.1-8b", 8030261248}};
  ASSERT_EQ(model_presets().size(), published.size());
  for (const auto& [name, count] : published) {
    const ModelShape shape = model_preset(name);
    EXPECT_EQ(shape.preset, name);
    EXPECT_EQ(shape.parameters(), count) << name;
    EXPECT_TRUE(problems(shape).empty()) << name;
    std::int64_t listed = 0;
    for (const Parameter& p : parameter_table(shape)) listed += p.numel();
    EXPECT_EQ(listed, count) << name;
  }
  // "Non-embedding" counts of the Qwen2.5 model cards: 0.36, 1.31, 2.77, 6.53 billion.
  EXPECT_NEAR(model_preset("qwen2.5-0.5b").parameters_without_embedding() / 1e9, 0.36, 0.005);
  EXPECT_NEAR(model_preset("qwen2.5-1.5b").parameters_without_embedding() / 1e9, 1.31, 0.005);
  EXPECT_NEAR(model_preset("qwen2.5-3b").parameters_without_embedding() / 1e9, 2.77, 0.005);
  EXPECT_NEAR(model_preset("qwen2.5-7b").parameters_without_embedding() / 1e9, 6.53, 0.005);
  // Of the Qwen3 cards: 0.44, 1.4, 3.6, 6.95, 13.2.
  EXPECT_NEAR(model_preset("qwen3-0.6b").parameters_without_embedding() / 1e9, 0.44, 0.005);
  EXPECT_NEAR(model_preset("qwen3-1.7b").parameters_without_embedding() / 1e9, 1.4, 0.05);
  EXPECT_NEAR(model_preset("qwen3-4b").parameters_without_embedding() / 1e9, 3.6, 0.05);
  EXPECT_NEAR(model_preset("qwen3-8b").parameters_without_embedding() / 1e9, 6.95, 0.005);
  EXPECT_NEAR(model_preset("qwen3-14b").parameters_without_embedding() / 1e9, 13.2, 0.05);
}

TEST(ModelShape, UnknownPresetNamesTheKnownOnes) {
  try {
    model_preset("qwen2.5-05b");
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("qwen2.5-05b"), std::string::npos);
    for (const std::string& name : model_presets())
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos);
  }
}

TEST(ModelShape, ProblemsNameEveryFault) {
  ModelShape s = model_preset("qwen2.5-0.5b");
  s.kv_heads = 3;
  s.head_dim = 65;
  s.rms_eps = 0;
  s.vocabulary = 0;
  s.yarn_factor = 0.5;
  EXPECT_EQ(problems(s).size(), 5u);
  s = model_preset("llama3.1-8b");
  s.yarn_factor = 4;
  EXPECT_EQ(problems(s).size(), 1u);
  s = model_preset("qwen3-0.6b");
  s.qkv_bias = true;
  ASSERT_EQ(problems(s).size(), 1u);
  EXPECT_EQ(problems(s)[0].keys.size(), 2u);
  EXPECT_GE(problems(ModelShape{}).size(), 7u);
}

TEST(ModelShape, TableOrderNamesAndFlags) {
  for (const bool tied : {false, true}) {
    ModelShape s = model_preset("qwen2.5-0.5b");
    s.layers = 3;
    s.tied_embedding = tied;
    const auto table = parameter_table(s);
    std::set<std::string> names;
    std::map<std::string, std::size_t> place;
    for (std::size_t i = 0; i < table.size(); ++i) {
      EXPECT_TRUE(names.insert(table[i].name).second) << table[i].name;
      place[table[i].name] = i;
      EXPECT_EQ(table[i].weight_decay, table[i].shape.size() == 2) << table[i].name;
      EXPECT_FALSE(table[i].tied_copy);
    }
    EXPECT_EQ(table.front().name, "model.embed_tokens.weight");
    EXPECT_EQ(table.back().name, tied ? "model.norm.weight" : "lm_head.weight");
    EXPECT_EQ(names.count("lm_head.weight"), tied ? 0u : 1u);
    for (const char* layer : {"model.layers.0.", "model.layers.2."}) {
      const std::string l = layer;
      EXPECT_EQ(place.at(l + "self_attn.k_proj.weight"),
                place.at(l + "self_attn.q_proj.weight") + 1);
      EXPECT_EQ(place.at(l + "self_attn.v_proj.weight"),
                place.at(l + "self_attn.q_proj.weight") + 2);
      EXPECT_EQ(place.at(l + "self_attn.k_proj.bias"), place.at(l + "self_attn.q_proj.bias") + 1);
      EXPECT_EQ(place.at(l + "self_attn.v_proj.bias"), place.at(l + "self_attn.q_proj.bias") + 2);
      EXPECT_EQ(place.at(l + "mlp.up_proj.weight"), place.at(l + "mlp.gate_proj.weight") + 1);
      EXPECT_TRUE(place.count(l + "input_layernorm.weight") &&
                  place.count(l + "post_attention_layernorm.weight"));
    }
    const Parameter& down = table[place.at("model.layers.1.mlp.down_proj.weight")];
    EXPECT_EQ(down.shape, (std::vector<std::int64_t>{896, 4864}));
    EXPECT_EQ(down.layer, 1);
    EXPECT_EQ(down.tp_dim, 1);
    EXPECT_DOUBLE_EQ(down.initial_std, 0.02 / std::sqrt(6.0));
    EXPECT_EQ(table[place.at("model.layers.1.self_attn.k_proj.weight")].shape,
              (std::vector<std::int64_t>{128, 896}));
    EXPECT_DOUBLE_EQ(table[place.at("model.layers.1.self_attn.k_proj.weight")].initial_std, 0.02);
  }
}

TEST(ModelShape, StagesPartitionTheTable) {
  ModelShape s = model_preset("qwen2.5-0.5b");
  const auto whole = parameter_table(s);
  const auto staged = parameter_table(s, {0, 5, 17});
  ASSERT_EQ(staged.size(), whole.size() + 1);  // the tied head's copy
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(staged[i].name, whole[i].name);
  for (const Parameter& p : staged) {
    if (p.layer >= 0) {
      EXPECT_EQ(p.stage, p.layer < 5 ? 0 : p.layer < 17 ? 1 : 2) << p.name;
    }
  }
  EXPECT_EQ(staged.front().stage, 0);
  EXPECT_EQ(staged.back().name, "model.embed_tokens.weight");
  EXPECT_TRUE(staged.back().tied_copy);
  EXPECT_EQ(staged.back().stage, 2);
  s.tied_embedding = false;
  EXPECT_EQ(parameter_table(s, {0, 12}).back().name, "lm_head.weight");
  EXPECT_THROW(parameter_table(s, {1, 5}), Error);
  EXPECT_THROW(parameter_table(s, {0, 5, 5}), Error);
  EXPECT_THROW(parameter_table(s, {0, 24}), Error);
}

TEST(ModelShape, TrainingFlops) {
  const ModelShape s = model_preset("qwen2.5-7b");
  // 6 per weight of the matrix products: all parameters but embedding, norms and biases.
  double products = 0;
  for (const Parameter& p : parameter_table(s))
    if (p.shape.size() == 2 && p.name != "model.embed_tokens.weight")
      products += static_cast<double>(p.numel());
  EXPECT_DOUBLE_EQ(s.training_flops(1000, 0), 6000.0 * products);
  EXPECT_DOUBLE_EQ(s.training_flops(0, 77), 77.0 * 12 * 128 * 28 * 28);
}

}  // namespace
}  // namespace ballast
