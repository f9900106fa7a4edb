// When keys are read: those of the command line that change nothing are named, and only they.  Keys
// that went name their successor.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/config/deck.hpp"
#include "core/config/deck_schema.hpp"

namespace ballast {
namespace {

using I = std::int64_t;
using S = std::string;

/// Every key of the schema, set on the command line to its default, or to what `other` says.
Deck all_set(const std::vector<std::pair<S, DeckValue>>& other) {
  Deck deck;
  for (const KeySpec& spec : deck_schema())
    deck.set(spec.path(), spec.default_value, "command line: x", Origin::command_line);
  for (const auto& [path, value] : other)
    deck.set(path, value, "command line: x", Origin::command_line);
  return deck;
}

std::vector<S> keys_of(const Deck& deck) {
  std::vector<S> keys;
  for (const Problem& note : without_effect(deck.config())) keys.push_back(note.keys.front().path);
  return keys;
}

TEST(DeckSchema, KeysOfFeaturesThatAreOffAreNamed) {
  // Packs of files, dense attention, zigzag, 1F1B, no tuning, adapters, curriculum or
  // recomputation.
  const std::vector<S> off = keys_of(all_set({{"batching.method", S("packed")},
                                              {"ring.layout", S("zigzag")},
                                              {"pipeline.schedule", S("1f1b")}}));
  for (const char* key : {"chunk.tokens",
                          "chunk.k",
                          "chunk.offload",
                          "chunk.window_tokens",
                          "attention.vertical_share",
                          "attention.slash_share",
                          "attention.last_q",
                          "attention.max_columns",
                          "attention.max_slashes",
                          "attention.moba_block",
                          "attention.moba_top_k",
                          "attention.xattention_block",
                          "attention.generated_density",
                          "ring.stripe",
                          "dst.anchor",
                          "dst.threshold",
                          "dst.base_budget",
                          "dst.budgets",
                          "sab.decay",
                          "batching.groups",
                          "batching.group_ranks",
                          "batching.group_recompute",
                          "batching.groups_from",
                          "batching.balance",
                          "batching.long",
                          "batching.select_lengths",
                          "batching.select_ranks",
                          "batching.select_memory_gib",
                          "batching.select_refine",
                          "batching.micro_batch_samples",
                          "pipeline.search",
                          "ring.layout",
                          "data.long",
                          "eval.samples",
                          "eval.depths",
                          "eval.generate_tokens",
                          "trace.recall_every",
                          "trace.recall_rows",
                          "trace.recall_drift",
                          "trace.indexes_every",
                          "curriculum.max_tokens",
                          "lora.alpha",
                          "lora.dropout",
                          "lora.projections",
                          "recompute.layers",
                          "data.path",
                          "data.mask_path",
                          "data.lengths",
                          "data.lengths_file",
                          "data.bin_tokens",
                          "data.bin_share",
                          "data.needle_keys"})
    EXPECT_EQ(std::count(off.begin(), off.end(), key), 1) << key;
  for (const char* key :
       {"data.paths", "data.extensions", "data.samples", "batching.method",
        "batching.micro_batch_tokens", "run.steps", "attention.pattern", "lora.rank", "dst.enabled",
        "chunk.search_tokens", "pipeline.schedule", "curriculum.steps"})
    EXPECT_EQ(std::count(off.begin(), off.end(), key), 0) << key;
}

TEST(DeckSchema, KeysOfFeaturesThatAreOnAreNot) {
  const std::vector<S> off = keys_of(all_set({{"batching.method", S("chunkflow")},
                                              {"chunk.offload", S("host")},
                                              {"attention.pattern", S("moba")},
                                              {"ring.layout", S("shuffled")},
                                              {"dst.enabled", true},
                                              {"pipeline.schedule", S("zero_bubble")},
                                              {"curriculum.steps", I{3}},
                                              {"lora.rank", I{4}},
                                              {"recompute.mode", S("full")},
                                              {"mesh.pp", I{2}},
                                              {"mesh.cp_inner", I{2}},
                                              {"data.max_tokens", I{9}},
                                              {"eval.every_steps", I{1}},
                                              {"data.source", S("megatron")}}));
  for (const char* prefix :
       {"chunk.", "attention.moba_", "ring.", "dst.", "pipeline.", "curriculum.", "lora.",
        "recompute.", "data.path ", "data.mask", "data.long", "eval.s", "trace.r"})
    EXPECT_TRUE(std::none_of(off.begin(), off.end(), [&](const S& key) {
      return (key + " ").starts_with(prefix);
    })) << prefix;
  for (const char* key : {"data.paths", "sab.decay", "batching.groups", "attention.selection",
                          "attention.stretch", "batching.window_rule", "eval.depths",
                          "model.llama3_low", "trace.indexes_every", "attention.generated_columns"})
    EXPECT_EQ(std::count(off.begin(), off.end(), key), 1) << key;
}

TEST(DeckSchema, KeysOfAPatternsOwnRuleAreNotReadWhereItsIndexIsMadeUp) {
  const std::vector<S> off = keys_of(
      all_set({{"attention.index", S("generated")}, {"attention.pattern", S("vertical_slash")}}));
  for (const char* key : {"attention.vertical_share", "attention.last_q", "attention.max_columns",
                          "trace.recall_every", "trace.recall_drift", "trace.indexes_every"})
    EXPECT_EQ(std::count(off.begin(), off.end(), key), 1) << key;
  EXPECT_TRUE(std::none_of(off.begin(), off.end(),
                           [](const S& key) { return key.starts_with("attention.generated_"); }));
}

TEST(DeckSchema, KeysOfTheDeckMayBeForOtherCases) {
  Deck deck;
  deck.set("chunk.tokens", I{2}, "deck.toml:3");
  EXPECT_TRUE(without_effect(deck.config()).empty());
  deck.set("chunk.tokens", I{2}, "command line: chunk.tokens=2", Origin::command_line);
  ASSERT_EQ(without_effect(deck.config()).size(), 1u);
  EXPECT_EQ(without_effect(deck.config())[0].message(),
            "chunk.tokens has no effect with batching.method = \"balanced\"; it is read with "
            "\"chunkflow\"");
}

/// The note on `path`, set on the command line, beside what `other` sets in the deck.
S note_on(const S& path, const std::vector<std::pair<S, DeckValue>>& other) {
  Deck deck;
  for (const auto& [key, value] : other) deck.set(key, value, "deck.toml:1");
  deck.set(path, find_key(path)->default_value, "command line: x", Origin::command_line);
  return messages(without_effect(deck.config()));
}

TEST(DeckSchema, KeyOfAFeatureThatIsNotReadItselfIsNamedWithWhatKeepsThatFromBeingRead) {
  EXPECT_EQ(note_on("chunk.window_tokens", {{"chunk.offload", S("host")}}), "");
  EXPECT_EQ(
      note_on("chunk.window_tokens", {{"chunk.offload", S("host")}, {"batching.method", S("lbb")}}),
      "chunk.window_tokens has no effect with batching.method = \"lbb\"; it is read "
      "with \"chunkflow\" or \"balanced\"");
  EXPECT_EQ(note_on("eval.generate_seed", {{"eval.generate_tokens", I{4}}}),
            "eval.generate_seed has no effect with eval.every_steps = 0");
}

TEST(DeckSchema, KeyThatSeveralFeaturesReadIsNamedWhereNoneIsOn) {
  const DeckValue packed = S("packed"), hbp = S("hbp");
  EXPECT_EQ(note_on("ring.layout", {{"batching.method", packed}}),
            "ring.layout has no effect with mesh.cp_inner = 1 and mesh.cp_outer = 1 and "
            "batching.method = \"packed\"; it is read with another mesh.cp_inner, or another "
            "mesh.cp_outer, or batching.method = \"hbp\" or \"balanced\"");
  EXPECT_EQ(note_on("ring.layout", {{"batching.method", packed}, {"mesh.cp_outer", I{2}}}), "");
  EXPECT_EQ(note_on("ring.layout", {{"batching.method", hbp}}), "");
  EXPECT_EQ(note_on("batching.micro_batch_tokens", {{"batching.method", packed}}), "");
  EXPECT_EQ(
      note_on("batching.micro_batch_tokens", {{"batching.method", hbp}}),
      "batching.micro_batch_tokens has no effect with batching.method = \"hbp\" and mesh.pp = "
      "1; it is read with another batching.method, or another mesh.pp");
  EXPECT_EQ(note_on("batching.micro_batch_tokens", {{"batching.method", hbp}, {"mesh.pp", I{2}}}),
            "");
}

TEST(DeckSchema, KeyOfTwoFeaturesNeedsBoth) {
  const DeckValue chunks = S("chunkflow");
  EXPECT_EQ(note_on("chunk.k", {{"batching.method", chunks}}), "");
  EXPECT_EQ(note_on("chunk.k", {{"batching.method", chunks}, {"mesh.pp", I{2}}}), "");
  EXPECT_EQ(note_on("chunk.k", {}), "");
  EXPECT_EQ(note_on("chunk.k", {{"mesh.pp", I{2}}}), "");
  EXPECT_NE(note_on("chunk.k", {{"pipeline.schedule", S("1f1b")}}), "") << "keeps every chunk";
  EXPECT_NE(note_on("chunk.k", {{"batching.method", S("packed")}}), "");
  EXPECT_EQ(note_on("chunk.k", {{"batching.method", chunks}, {"pipeline.schedule", S("gpipe")}}),
            "chunk.k has no effect with pipeline.schedule = \"gpipe\"; it is read with "
            "\"state_aware_1f1b\" or \"zero_bubble\" or \"auto\"");
  EXPECT_EQ(note_on("pipeline.search", {{"mesh.pp", I{2}}, {"batching.method", chunks}}), "");
  EXPECT_EQ(note_on("pipeline.search", {{"mesh.pp", I{2}}}), "");
  EXPECT_NE(note_on("pipeline.search", {{"mesh.pp", I{2}}, {"batching.method", S("packed")}}), "");
  EXPECT_NE(note_on("pipeline.search", {{"batching.method", chunks}}), "");
}

TEST(DeckSchema, StepsThatNobodyCanPlanAreOutOfRange) {
  const KeySpec &tokens = *find_key("batching.global_tokens"),
                &samples = *find_key("batching.global_samples");
  const auto power = [](int n) { return DeckValue(std::int64_t{1} << n); };
  for (int n : {22, 26, 30, 34}) EXPECT_EQ(value_problem(tokens, power(n)), "");
  EXPECT_NE(value_problem(tokens, power(40)).find("batching.global_tokens = 1099511627776"),
            std::string::npos);
  EXPECT_EQ(value_problem(samples, power(24)), "");
  EXPECT_NE(value_problem(samples, power(40)), "");
}

TEST(DeckSchema, TextsWithNulCharactersAreRefusedButInPrompts) {
  using Texts = std::vector<std::string>;
  const std::string cut("a\0b", 3);
  EXPECT_NE(value_problem(*find_key("data.path"), cut).find("data.path"), std::string::npos);
  EXPECT_NE(value_problem(*find_key("data.paths"), Texts{"a", cut}), "");
  EXPECT_EQ(value_problem(*find_key("eval.generate_prompts"), Texts{cut}), "");
}

TEST(DeckSchema, RetiredKeysAreGoneAndTheirSuccessorsAreThere) {
  ASSERT_FALSE(retired_keys().empty());
  for (const RetiredKey& key : retired_keys()) {
    EXPECT_EQ(find_key(key.path), nullptr) << key.path;
    EXPECT_EQ(find_retired(key.path), &key);
    if (!key.successor.empty()) {
      EXPECT_NE(find_key(key.successor), nullptr) << key.path;
    }
    EXPECT_FALSE(key.remark.empty()) << key.path;
  }
  EXPECT_EQ(find_retired("mesh.dp"), nullptr);
}

}  // namespace
}  // namespace ballast
