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
                          "batching.micro_batch_samples",
                          "pipeline.search",
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
                                              {"attention.index", S("generated")},
                                              {"ring.layout", S("shuffled")},
                                              {"dst.enabled", true},
                                              {"pipeline.schedule", S("zero_bubble")},
                                              {"curriculum.steps", I{3}},
                                              {"lora.rank", I{4}},
                                              {"recompute.mode", S("full")},
                                              {"data.source", S("megatron")}}));
  for (const char* prefix :
       {"chunk.", "attention.moba_", "attention.generated_", "ring.", "dst.", "pipeline.",
        "curriculum.", "lora.", "recompute.", "data.path ", "data.mask"})
    EXPECT_TRUE(std::none_of(off.begin(), off.end(), [&](const S& key) {
      return (key + " ").starts_with(prefix);
    })) << prefix;
  for (const char* key : {"data.paths", "sab.decay", "batching.groups", "attention.last_q",
                          "attention.selection", "batching.window_rule", "model.llama3_low"})
    EXPECT_EQ(std::count(off.begin(), off.end(), key), 1) << key;
}

TEST(DeckSchema, KeysOfTheDeckMayBeForOtherCases) {
  Deck deck;
  deck.set("chunk.k", I{2}, "deck.toml:3");
  EXPECT_TRUE(without_effect(deck.config()).empty());
  deck.set("chunk.k", I{2}, "command line: chunk.k=2", Origin::command_line);
  ASSERT_EQ(without_effect(deck.config()).size(), 1u);
  EXPECT_EQ(
      without_effect(deck.config())[0].message(),
      "chunk.k has no effect with batching.method = \"balanced\"; it is read with \"chunkflow\"");
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
