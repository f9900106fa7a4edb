// Deck: the schema is consistent, values are typed and checked, text forms read back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "core/base/nearest_name.hpp"
#include "core/config/deck.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "core/model/model_shape.hpp"
#include "core/model/presets.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

TEST(DeckSchema, EveryKeyIsUniqueKnownAndDescribed) {
  std::set<std::string> paths;
  for (const KeySpec& spec : deck_schema()) {
    EXPECT_TRUE(paths.insert(spec.path()).second) << spec.path() << " twice";
    const BlockSpec* block = find_block(spec.block);
    ASSERT_NE(block, nullptr) << spec.path();
    EXPECT_EQ(find_key(spec.path()), &spec);
    EXPECT_FALSE(spec.meaning.empty()) << spec.path();
    EXPECT_EQ(spec.meaning.find('\n'), std::string::npos) << spec.path();
    EXPECT_TRUE(std::all_of(spec.key.begin(), spec.key.end(), [](char c) {
      return std::islower(c) || std::isdigit(c) || c == '_';
    })) << spec.path();
  }
}

TEST(DeckSchema, EveryDefaultIsAcceptable) {
  for (const KeySpec& spec : deck_schema())
    EXPECT_EQ(value_problem(spec, spec.default_value), "") << spec.path();
}

TEST(DeckSchema, BoundsFitTypes) {
  for (const KeySpec& spec : deck_schema()) {
    const bool number = std::holds_alternative<std::int64_t>(spec.default_value) ||
                        std::holds_alternative<double>(spec.default_value) ||
                        std::holds_alternative<std::vector<std::int64_t>>(spec.default_value) ||
                        std::holds_alternative<std::vector<double>>(spec.default_value);
    EXPECT_TRUE(number || !(spec.minimum || spec.maximum)) << spec.path();
    EXPECT_TRUE(!spec.minimum || !spec.maximum || *spec.minimum < *spec.maximum) << spec.path();
    EXPECT_TRUE(std::holds_alternative<std::string>(spec.default_value) ||
                std::holds_alternative<std::vector<std::string>>(spec.default_value) ||
                spec.allowed.empty())
        << spec.path();
  }
}

TEST(DeckSchema, EveryDesignBlockIsKnownAndHasKeys) {
  const std::vector<std::string> design = {
      "run",  "mesh",  "model",      "data",  "batching", "chunk",      "pipeline",  "attention",
      "ring", "dst",   "sab",        "loss",  "dpo",      "curriculum", "optimizer", "recompute",
      "lora", "costs", "checkpoint", "trace", "profile",  "eval"};
  ASSERT_EQ(deck_blocks().size(), design.size());
  for (const auto& name : design) {
    const BlockSpec* block = find_block(name);
    ASSERT_NE(block, nullptr) << name;
    EXPECT_FALSE(block_keys(name).empty()) << name;
    EXPECT_FALSE(block->meaning.empty()) << name;
  }
}

TEST(DeckSchema, HelpNamesEveryKeyUnitAndAllowedValue) {
  const std::string help = deck_help();
  for (const KeySpec& spec : deck_schema()) {
    EXPECT_NE(help.find("  " + spec.key + " = " + to_text(spec.default_value) + "\n"),
              std::string::npos)
        << spec.path();
    EXPECT_NE(help.find(spec.meaning), std::string::npos) << spec.path();
    for (const auto& value : spec.allowed)
      EXPECT_NE(help.find("\"" + value + "\""), std::string::npos) << spec.path();
  }
  EXPECT_EQ(deck_help("nothing"), "");
  EXPECT_NE(deck_help("ring").find("stripe"), std::string::npos);
  EXPECT_EQ(deck_help("ring").find("dp ="), std::string::npos);
}

/// Plain recursive edit distance with swaps, as reference.
std::size_t slow_distance(const std::string& a, const std::string& b, std::size_t i,
                          std::size_t j) {
  if (i == 0 || j == 0) return std::max(i, j);
  std::size_t best = std::min({slow_distance(a, b, i - 1, j) + 1, slow_distance(a, b, i, j - 1) + 1,
                               slow_distance(a, b, i - 1, j - 1) + (a[i - 1] != b[j - 1])});
  if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
    best = std::min(best, slow_distance(a, b, i - 2, j - 2) + 1);
  return best;
}

TEST(DeckNames, NearestIsTheNearestByASlowReference) {
  const std::uint64_t seed = test_seed();
  std::mt19937 random(seed);
  const auto word = [&] {
    std::string text(1 + random() % 6, 'a');
    for (char& c : text) c = static_cast<char>('a' + random() % 3);
    return text;
  };
  for (int trial = 0; trial < 300; ++trial) {
    const std::string name = word();
    const std::vector<std::string> candidates{word(), word(), word()};
    const std::string near = nearest_name(name, candidates);
    std::size_t least = 100;
    for (const auto& c : candidates)
      least = std::min(least, slow_distance(name, c, name.size(), c.size()));
    if (near.empty()) {
      EXPECT_GT(least, 0u) << "seed " << seed;
    } else {
      EXPECT_EQ(slow_distance(name, near, name.size(), near.size()), least)
          << name << " -> " << near << ", seed " << seed;
    }
  }
}

TEST(DeckNames, UsualSlipsAreFoundAndStrangersAreNot) {
  const auto keys = block_keys("optimizer");
  EXPECT_EQ(nearest_name("learing_rate", keys), "learning_rate");
  EXPECT_EQ(nearest_name("Learning_Rate", keys), "learning_rate");
  EXPECT_EQ(nearest_name("betal", keys), "beta1");
  EXPECT_EQ(nearest_name("clpi_norm", keys), "clip_norm");
  EXPECT_EQ(nearest_name("quux", keys), "");
  EXPECT_EQ(nearest_name("", keys), "");
  EXPECT_EQ(nearest_name(std::string(1000, 'x'), keys), "");
  EXPECT_EQ(nearest_name("x", {}), "");
}

TEST(DeckValues, RangesAreInclusiveUnlessOpen) {
  const auto problem = [](const char* path, DeckValue value) {
    return value_problem(*find_key(path), value);
  };
  EXPECT_EQ(problem("optimizer.beta1", 0.0), "");
  EXPECT_EQ(problem("optimizer.beta1", 0.999), "");
  EXPECT_NE(problem("optimizer.beta1", 1.0), "");
  EXPECT_NE(problem("optimizer.eps", 0.0), "");
  EXPECT_NE(problem("mesh.dp", std::int64_t{0}), "");
  EXPECT_EQ(problem("mesh.dp", std::int64_t{1}), "");
  EXPECT_EQ(problem("optimizer.zero", std::int64_t{2}), "");
  EXPECT_NE(problem("optimizer.zero", std::int64_t{3}), "");
  EXPECT_NE(problem("optimizer.learning_rate", std::nan("")), "");
  EXPECT_NE(problem("optimizer.learning_rate", std::numeric_limits<double>::infinity()), "");
  EXPECT_NE(problem("data.bin_share", std::vector<double>{0.5, -0.1}), "");
  EXPECT_NE(problem("data.bin_tokens", std::vector<std::int64_t>{1, 0}), "");
  const std::string text = problem("ring.layout", std::string("zigzga"));
  EXPECT_NE(text.find("did you mean \"zigzag\"?"), std::string::npos) << text;
  EXPECT_NE(text.find("\"contiguous\", \"zigzag\", \"striped\""), std::string::npos) << text;
  EXPECT_EQ(problem("run.seed", std::numeric_limits<std::int64_t>::max()), "");
}

TEST(DeckValues, TextIsToml) {
  EXPECT_EQ(to_text(true), "true");
  EXPECT_EQ(to_text(std::int64_t{-3}), "-3");
  EXPECT_EQ(to_text(1.0), "1.0");
  EXPECT_EQ(to_text(1e-8), "1e-08");
  EXPECT_EQ(to_text(0.1), "0.1");
  EXPECT_EQ(to_text(std::string("a\"b\\c\n\x01")), "\"a\\\"b\\\\c\\n\\u0001\"");
  EXPECT_EQ(to_text(std::vector<std::int64_t>{1, 2}), "[1, 2]");
  EXPECT_EQ(to_text(std::vector<double>{0.5, 2}), "[0.5, 2.0]");
  EXPECT_EQ(to_text(std::vector<std::string>{}), "[]");
}

TEST(DeckValues, DefaultsPlacesAndTypes) {
  Deck deck;
  EXPECT_EQ(deck.get<std::int64_t>("mesh.dp"), 1);
  EXPECT_FALSE(deck.is_set("mesh.dp"));
  deck.set("mesh.dp", std::int64_t{3}, "deck.toml:4");
  EXPECT_EQ(deck.get<std::int64_t>("mesh.dp"), 3);
  EXPECT_EQ(deck.config().from.settings.at("mesh.dp").place, "deck.toml:4");
  EXPECT_THROW(deck.get<std::int64_t>("mesh.dpp"), std::logic_error);
  EXPECT_THROW(deck.get<double>("mesh.dp"), std::logic_error);
  EXPECT_THROW(deck.set("mesh.dp", 1.5, "x"), std::logic_error);
  EXPECT_THROW(deck.set("mesh.nothing", 1.5, "x"), std::logic_error);
}

TEST(DeckPreset, FillsTheShapeAndExplicitKeysWin) {
  for (const auto& name : model_presets()) {
    Deck deck;
    deck.set("model.preset", name, "deck.toml:1");
    const ModelShape published = model_preset(name);
    ModelShape shape = model_shape(deck.config());
    EXPECT_EQ(shape.parameters(), published.parameters()) << name;
    EXPECT_EQ(shape.llama3_factor, published.llama3_factor) << name;
    EXPECT_EQ(shape.rms_eps, published.rms_eps) << name;
    EXPECT_EQ(shape.original_context, published.original_context) << name;
    deck.set("model.layers", std::int64_t{2}, "deck.toml:2");
    deck.set("model.qkv_bias", false, "deck.toml:3");
    shape = model_shape(deck.config());
    EXPECT_EQ(shape.layers, 2);
    EXPECT_FALSE(shape.qkv_bias);
    EXPECT_EQ(shape.hidden, published.hidden);
    deck.apply_preset();
    EXPECT_EQ(deck.get<std::int64_t>("model.hidden"), published.hidden);
    EXPECT_EQ(deck.get<std::int64_t>("model.layers"), 2);
    EXPECT_EQ(deck.config().from.settings.at("model.hidden").place, "preset " + name);
  }
}

TEST(DeckWeights, FillTheShapeAndContradictionsAreNamed) {
  ModelShape shape = model_preset("llama3.1-8b");
  Deck deck;
  deck.set("model.weights", std::string("folder"), "deck.toml:1");
  EXPECT_FALSE(deck.states_shape());
  EXPECT_TRUE(deck.apply_weights(shape).empty());
  EXPECT_TRUE(deck.states_shape());
  const ModelShape filled = model_shape(deck.config());
  EXPECT_EQ(filled.parameters(), shape.parameters());
  EXPECT_EQ(filled.llama3_factor, shape.llama3_factor);
  EXPECT_EQ(filled.llama3_high, shape.llama3_high);
  EXPECT_EQ(filled.rms_eps, shape.rms_eps);
  EXPECT_EQ(filled.rope_theta, shape.rope_theta);
  EXPECT_TRUE(deck.apply_weights(shape).empty());  // again, as with an effective deck

  shape.layers = 31;
  shape.tied_embedding = true;
  shape.rope_theta = 1e7;  // stretches the context: the deck's value stays
  const auto problems = deck.apply_weights(shape);
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_NE(problems[0].message().find("model.layers = 32 contradicts 31 in folder/config.json"),
            std::string::npos)
      << problems[0].message();
  EXPECT_NE(problems[1].message().find("model.tied_embedding"), std::string::npos)
      << problems[1].message();
  EXPECT_EQ(model_shape(deck.config()).rope_theta, 5e5);

  Deck preset;
  preset.set("model.preset", std::string("qwen2.5-0.5b"), "deck.toml:2");
  EXPECT_TRUE(preset.states_shape());
  preset.set("model.weights", std::string("folder"), "deck.toml:1");
  EXPECT_TRUE(preset.apply_weights(model_preset("qwen2.5-0.5b")).empty());
  EXPECT_FALSE(preset.apply_weights(model_preset("qwen2.5-1.5b")).empty());
}

TEST(DeckWeights, OfTheCommandLineReplaceAPresetOfTheDeck) {
  const ModelShape other = model_preset("qwen2.5-1.5b");
  for (const Origin of_preset : {Origin::file, Origin::command_line})
    for (const Origin of_weights : {Origin::file, Origin::command_line}) {
      Deck deck;
      deck.set("model.preset", std::string("qwen2.5-0.5b"), "place", of_preset);
      deck.set("model.weights", std::string("folder"), "place", of_weights);
      const bool replaced = of_preset == Origin::file && of_weights == Origin::command_line;
      EXPECT_EQ(deck.apply_weights(other).empty(), replaced);
      if (replaced) {
        EXPECT_EQ(model_shape(deck.config()).parameters(), other.parameters());
      }
    }
}

TEST(DeckOptions, EveryOptionComesFromItsKey) {
  Deck deck;
  const auto set = [&](const char* path, DeckValue value) {
    deck.set(path, std::move(value), "test");
  };
  set("mesh.dp", std::int64_t{2});
  set("mesh.pp", std::int64_t{3});
  set("mesh.cp_outer", std::int64_t{5});
  set("mesh.cp_inner", std::int64_t{7});
  set("mesh.sp", std::int64_t{11});
  set("mesh.tp", std::int64_t{13});
  set("mesh.ranks_per_node", std::int64_t{17});
  set("model.preset", std::string("qwen2.5-0.5b"));
  set("batching.method", std::string("none"));
  set("batching.micro_batch_tokens", std::int64_t{19});
  set("ring.layout", std::string("striped"));
  set("ring.stripe", std::int64_t{23});
  const RunOptions o = RunOptions::from(deck.config());
  EXPECT_EQ(o.mesh, (MeshShape{2, 3, 5, 7, 11, 13, 17}));
  EXPECT_EQ(o.batching.method, Batching::none);
  EXPECT_EQ(o.batching.micro_batch_tokens, 19);
  EXPECT_EQ(o.batching.dp, 2);
  EXPECT_EQ(o.layout.rule, (LayoutRule{LayoutKind::striped, 23, 1}));
  // One more visible pair costs 4 D Hq L FLOPs; training_flops counts forward and backward, 3 times
  // as many.
  const double pair = (o.model.training_flops(0, 1) - o.model.training_flops(0, 0)) / 3;
  EXPECT_DOUBLE_EQ(pair, 4.0 * 64 * 14 * 24);
  EXPECT_NEAR(o.batching.pair_cost_tokens, pair / (o.model.training_flops(1, 0) / 3),
              1e-3 * o.batching.pair_cost_tokens);
  EXPECT_EQ(RunOptions::from(Config()).batching.pair_cost_tokens, 0);
}

}  // namespace
}  // namespace ballast
