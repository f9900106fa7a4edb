// Cross-key rules of decks: each fires on its breach, at the right place, and stays silent on what
// is sound.
#include <gtest/gtest.h>

#include "core/config/deck.hpp"
#include "core/config/deck_rules.hpp"

namespace ballast {
namespace {

Deck sound() {
  Deck deck;
  deck.file = "deck.toml";
  deck.set("model.preset", std::string("qwen2.5-0.5b"), "deck.toml:1");
  deck.set("data.paths", std::vector<std::string>{"/usr/include"}, "deck.toml:2");
  return deck;
}

/// The problems of a deck's Config, each with its place.
std::vector<std::string> deck_problems(const Deck& deck, DeckNeeds needs = {},
                                       const std::set<Key>& faulty = {}) {
  const Config config = deck.config();
  std::vector<std::string> list;
  for (const Problem& problem : problems(config, needs, faulty)) {
    EXPECT_FALSE(problem.keys.empty()) << problem.text;
    for (const Key& key : problem.keys)
      EXPECT_NE(find_key(key.path), nullptr) << key.path << " of " << problem.text;
    list.push_back(placed(problem, config.from));
  }
  return list;
}

struct Breach {
  const char* name;
  std::vector<std::pair<std::string, DeckValue>> settings;
  const char* place;    // begins the message
  const char* mention;  // somewhere in it
};

void PrintTo(const Breach& breach, std::ostream* out) { *out << breach.name; }

class DeckRule : public ::testing::TestWithParam<Breach> {};

TEST_P(DeckRule, FiresOnceAtItsPlace) {
  Deck deck = sound();
  int line = 10;
  for (const auto& [path, value] : GetParam().settings)
    deck.set(path, value, fmt::format("deck.toml:{}", line++));
  const auto list = deck_problems(deck);
  ASSERT_EQ(list.size(), 1u) << fmt::format("{}", fmt::join(list, "\n"));
  EXPECT_EQ(list[0].rfind(std::string(GetParam().place) + ": ", 0), 0u) << list[0];
  EXPECT_NE(list[0].find(GetParam().mention), std::string::npos) << list[0];
}

using I = std::int64_t;
using S = std::string;
INSTANTIATE_TEST_SUITE_P(
    All, DeckRule,
    ::testing::Values(
        Breach{"bf16_on_host", {{"run.precision", S("bf16")}}, "deck.toml:10", "cuda"},
        Breach{"odd_width_on_cuda",
               {{"run.backend", S("cuda")}, {"model.intermediate", I{4868}}},
               "deck.toml:11",
               "8 elements at a time"},
        Breach{"wide_model_on_cuda",
               {{"run.backend", S("cuda")}, {"model.hidden", I{16392}}},
               "deck.toml:11",
               "at most 16384"},
        Breach{"fp64_on_cuda",
               {{"run.backend", S("cuda")}, {"run.precision", S("fp64")}},
               "deck.toml:11",
               "host"},
        Breach{"head_dim_on_cuda",
               {{"model.head_dim", I{32}}, {"run.backend", S("cuda")}},
               "deck.toml:10",
               "64, 96, 128 or 256"},
        Breach{"query_heads_a_key_head_on_cuda",
               {{"model.kv_heads", I{1}}, {"model.query_heads", I{32}}, {"run.backend", S("cuda")}},
               "deck.toml:10",
               "at most 16"},
        Breach{"eval_without_validation",
               {{"eval.every_steps", I{5}}},
               "deck.toml:10",
               "data.validation_share"},
        Breach{"nothing_to_continue",
               {{"eval.generate_tokens", I{3}}},
               "deck.toml:10",
               "set eval.generate_prompts or eval.generate_samples"},
        Breach{"texts_for_tokens",
               {{"data.lengths", std::vector<I>{64}},
                {"data.source", S("lengths")},
                {"eval.generate_prompts", std::vector<S>{"the "}},
                {"eval.generate_tokens", I{3}}},
               "deck.toml:12",
               "does not run"},
        Breach{"sab_without_backward",
               {{"batching.method", S("sab")},
                {"costs.backward_over_forward", 0.0},
                {"costs.forward_pair_s", 1e-9},
                {"costs.forward_token_s", 1e-6}},
               "deck.toml:10",
               "predict latency"},
        Breach{"mesh_too_large",
               {{"mesh.dp", I{1 << 20}}, {"mesh.pp", I{16}}, {"mesh.cp_outer", I{1 << 20}}},
               "deck.toml:10",
               "2147483647"},
        Breach{"node_does_not_divide",
               {{"mesh.dp", I{6}}, {"mesh.ranks_per_node", I{4}}},
               "deck.toml:10",
               "6 = 1 x 4 + 2"},
        Breach{"inner_ring_leaves_node",
               {{"mesh.cp_inner", I{4}}, {"mesh.cp_outer", I{2}}, {"mesh.ranks_per_node", I{2}}},
               "deck.toml:11",
               "cp_inner 4 x sp 1 x tp 1 = 4"},
        Breach{"heads_over_sequence_ranks", {{"mesh.sp", I{4}}}, "deck.toml:10", "14 = 3 x 4 + 2"},
        Breach{"group_that_does_not_divide",
               {{"batching.method", S("balanced")},
                {"batching.select_ranks", std::vector<I>{1, 3}},
                {"mesh.dp", I{4}}},
               "deck.toml:11",
               "3 does not divide mesh.dp = 4"},
        Breach{"group_recomputes_more_than_all",
               {{"batching.group_recompute", std::vector<I>{0, 25}},
                {"batching.groups", std::vector<I>{64, 128}},
                {"batching.method", S("hbp")}},
               "deck.toml:10",
               "24 layers"},
        Breach{"groups_from_no_table",
               {{"batching.groups_from", S("profile")}, {"batching.method", S("hbp")}},
               "deck.toml:10",
               "needs profile.table"},
        Breach{"profiled_prefixes_that_cut_blocks",
               {{"attention.pattern", S("moba")}, {"profile.prefixes", std::vector<I>{64, 100}}},
               "deck.toml:11",
               "multiples of 64"},
        Breach{"profiled_lengths_that_cut_blocks",
               {{"attention.pattern", S("moba")}, {"profile.lengths", std::vector<I>{8, 64}}},
               "deck.toml:11",
               "multiples of 64"},
        Breach{"groups_selected_over_stages",
               {{"batching.groups", std::vector<I>{64}},
                {"batching.method", S("hbp")},
                {"batching.select_lengths", std::vector<I>{64}},
                {"mesh.pp", I{2}}},
               "deck.toml:12",
               "through 2 stages"},
        Breach{"more_stages_than_layers", {{"mesh.pp", I{25}}}, "deck.toml:10", "24 layers"},
        Breach{"heads_do_not_divide",
               {{"model.kv_heads", I{3}}},
               "deck.toml:10",
               "query_heads = 14 is not a multiple of kv_heads = 3"},
        Breach{"odd_head_dim", {{"model.head_dim", I{63}}}, "deck.toml:10", "odd"},
        Breach{"byte_vocabulary", {{"model.vocabulary", I{255}}}, "deck.toml:10", "256"},
        Breach{"no_paths", {{"data.paths", std::vector<S>{}}}, "deck.toml:10", "data.paths"},
        Breach{
            "megatron_without_path", {{"data.source", S("megatron")}}, "deck.toml:10", "data.path"},
        Breach{"hdf5_without_path", {{"data.source", S("hdf5")}}, "deck.toml:10", "data.path"},
        Breach{"lengths_without_file",
               {{"data.source", S("lengths")}},
               "deck.toml:10",
               "data.lengths_file"},
        Breach{"distribution_without_samples",
               {{"data.source", S("distribution")},
                {"data.bin_tokens", std::vector<I>{4}},
                {"data.bin_share", std::vector<double>{1}}},
               "deck.toml:10",
               "data.samples"},
        Breach{"bins_and_shares_differ",
               {{"data.source", S("distribution")},
                {"data.samples", I{9}},
                {"data.bin_tokens", std::vector<I>{4, 8}},
                {"data.bin_share", std::vector<double>{1}}},
               "deck.toml:13",
               "1 values for 2 bins"},
        Breach{"bins_descend",
               {{"data.source", S("distribution")},
                {"data.samples", I{9}},
                {"data.bin_tokens", std::vector<I>{8, 4}},
                {"data.bin_share", std::vector<double>{1, 1}}},
               "deck.toml:12",
               "ascend"},
        Breach{"shares_sum_to_nothing",
               {{"data.source", S("distribution")},
                {"data.samples", I{9}},
                {"data.bin_tokens", std::vector<I>{4}},
                {"data.bin_share", std::vector<double>{0}}},
               "deck.toml:13",
               "positive sum"},
        Breach{"first_bin_below_shortest",
               {{"data.source", S("distribution")},
                {"data.samples", I{9}},
                {"data.min_tokens", I{5}},
                {"data.bin_tokens", std::vector<I>{4}},
                {"data.bin_share", std::vector<double>{1}}},
               "deck.toml:13",
               "data.min_tokens = 5"},
        Breach{"needle_without_samples",
               {{"data.source", S("needle")}, {"data.needle_lengths", std::vector<I>{128}}},
               "deck.toml:10",
               "data.samples"},
        Breach{"needle_does_not_fit",
               {{"data.source", S("needle")},
                {"data.samples", I{9}},
                {"data.needle_lengths", std::vector<I>{79}}},
               "deck.toml:12",
               "79 tokens do not hold 16 pairs"},
        Breach{"needle_asks_too_much",
               {{"data.source", S("needle")},
                {"data.samples", I{9}},
                {"data.needle_lengths", std::vector<I>{128}},
                {"data.needle_questions", std::vector<I>{17}}},
               "deck.toml:13",
               "above data.needle_pairs = 16"},
        Breach{"needle_is_never_cut",
               {{"data.source", S("needle")},
                {"data.samples", I{9}},
                {"data.needle_lengths", std::vector<I>{128}},
                {"data.max_tokens", I{64}}},
               "deck.toml:13",
               "never cut"},
        Breach{"needle_with_a_validation_share",
               {{"data.source", S("needle")},
                {"data.samples", I{9}},
                {"data.needle_lengths", std::vector<I>{128}},
                {"data.validation_share", 0.1}},
               "deck.toml:13",
               "data.needle_held_out"},
        Breach{"needle_eval_without_held_out",
               {{"data.source", S("needle")},
                {"data.samples", I{9}},
                {"data.needle_lengths", std::vector<I>{128}},
                {"eval.every_steps", I{5}}},
               "deck.toml:13",
               "data.needle_held_out"},
        Breach{"lora_projection_twice",
               {{"lora.rank", I{4}}, {"lora.projections", std::vector<S>{"q", "q"}}},
               "deck.toml:11",
               "twice"},
        Breach{"chunks_cut_a_block_of_xattention",
               {{"batching.method", S("chunkflow")},
                {"attention.pattern", S("xattention")},
                {"chunk.tokens", I{64}}},
               "deck.toml:12",
               "multiple of 128"},
        Breach{"shortest_above_longest",
               {{"data.min_tokens", I{20}}, {"data.max_tokens", I{10}}},
               "deck.toml:10",
               "no sample"},
        Breach{"rates_swapped",
               {{"optimizer.minimum_learning_rate", 0.1}},
               "deck.toml:10",
               "optimizer.learning_rate"},
        Breach{"warmup_after_decay",
               {{"optimizer.warmup_steps", I{20}}, {"optimizer.decay_steps", I{10}}},
               "deck.toml:10",
               "optimizer.decay_steps = 10"},
        Breach{"recompute_more_than_all",
               {{"recompute.mode", S("full")}, {"recompute.layers", I{25}}},
               "deck.toml:11",
               "24 layers"},
        Breach{"selective_more_than_all",
               {{"recompute.mode", S("selective")}, {"recompute.layers", I{25}}},
               "deck.toml:11",
               "24 layers"}),
    [](const auto& info) { return S(info.param.name); });

TEST(DeckRules, SoundDecksHaveNoProblems) {
  Deck deck = sound();
  EXPECT_TRUE(deck_problems(deck).empty());
  deck.set("mesh.cp_inner", std::int64_t{8}, "x");  // a flat ring may span nodes
  deck.set("mesh.ranks_per_node", std::int64_t{4}, "x");
  deck.set("recompute.mode", std::string("full"), "x");
  deck.set("recompute.layers", std::int64_t{24}, "x");
  EXPECT_EQ(fmt::format("{}", fmt::join(deck_problems(deck), "\n")), "");
}

// Just what a rule allows.
TEST(DeckRules, BoundariesAreSound) {
  using Settings = std::vector<std::pair<std::string, DeckValue>>;
  for (const Settings& settings : {Settings{{"attention.pattern", S("vertical_slash")},
                                            {"attention.selection", S("causal")},
                                            {"attention.stretch", I{1024}},
                                            {"batching.method", S("balanced")},
                                            {"batching.micro_batch_tokens", I{1024}},
                                            {"mesh.dp", I{1}}},
                                   Settings{{"optimizer.schedule", S("wsd")},
                                            {"optimizer.decay_steps", I{100}},
                                            {"optimizer.warmup_steps", I{30}},
                                            {"optimizer.wsd_decay_steps", I{70}}},
                                   Settings{{"batching.method", S("hbp")},
                                            {"batching.groups", std::vector<I>{256, 2048}},
                                            {"batching.long", S("split")},
                                            {"data.max_tokens", I{2048}}}}) {
    Deck deck = sound();
    for (const auto& [path, value] : settings) deck.set(path, value, "deck.toml:9");
    EXPECT_EQ(fmt::format("{}", fmt::join(deck_problems(deck), "\n")), "") << settings[0].first;
  }
}

TEST(DeckRules, WhatNoExecutorRunsIsRefusedWhereRanksRunIt) {
  Deck deck = sound();
  deck.set("mesh.tp", std::int64_t{2}, "deck.toml:3");
  deck.set("batching.method", std::string("packed"), "deck.toml:2");
  deck.set("batching.scope", std::string("epoch"), "deck.toml:4");
  const auto list = deck_problems(deck);
  ASSERT_EQ(list.size(), 2u) << fmt::format("{}", fmt::join(list, "\n"));
  EXPECT_EQ(list[0],
            "deck.toml:3: mesh.tp above 1: tensor parallelism cannot be run by this version; set "
            "mesh.tp = 1 and use optimizer.zero and the ring (mesh.cp_outer, mesh.cp_inner)");
  EXPECT_TRUE(list[1].starts_with("deck.toml:4: batching.scope = \"epoch\" is for `ballast pack`"))
      << list[1];
  EXPECT_EQ(deck_problems(deck, {.executes = false}), std::vector{list[0]});
}

TEST(DeckRules, TimesThatBuiltInRatesWouldLeaveUnreadAreRefused) {
  for (const char* key : {"exchange_token_s", "ring_hop_token_s", "forward_micro_batch_s",
                          "stage_hop_token_s", "backward_over_forward"}) {
    Deck deck = sound();
    deck.set(std::string("costs.") + key, 1e-6, "deck.toml:9");
    const auto list = deck_problems(deck);
    ASSERT_EQ(list.size(), 1u) << key;
    EXPECT_TRUE(list[0].starts_with(fmt::format("deck.toml:9: costs.{} has no effect", key)))
        << list[0];
    deck.set("costs.forward_pair_s", 1e-9, "deck.toml:10");
    EXPECT_TRUE(deck_problems(deck).empty()) << key;
  }
}

TEST(DeckRules, ACustomModelStatesItsWholeShape) {
  Deck deck;
  deck.file = "deck.toml";
  const auto list = deck_problems(deck, {.model = true, .data = false});
  ASSERT_EQ(list.size(), 7u) << fmt::format("{}", fmt::join(list, "\n"));
  for (const auto& message : list) EXPECT_EQ(message.rfind("deck.toml: model.", 0), 0u) << message;
}

TEST(DeckRules, WhatACommandDoesNotNeedMayBeMissingButNotWrong) {
  Deck deck;
  EXPECT_TRUE(deck_problems(deck, {.model = false, .data = false}).empty());
  deck.set("model.layers", std::int64_t{2}, "deck.toml:3");
  EXPECT_FALSE(deck_problems(deck, {.model = false, .data = false}).empty());
}

TEST(DeckRules, StaySilentAboutFaultyKeys) {
  Deck deck = sound();
  deck.set("data.paths", std::vector<std::string>{}, "deck.toml:2");
  deck.set("data.min_tokens", std::int64_t{20}, "deck.toml:3");
  deck.set("data.max_tokens", std::int64_t{10}, "deck.toml:4");
  EXPECT_EQ(deck_problems(deck).size(), 2u);
  EXPECT_EQ(deck_problems(deck, {}, {"data.paths"}).size(), 1u);
  EXPECT_TRUE(deck_problems(deck, {}, {"data.paths", "data.max_tokens"}).empty());
}

}  // namespace
}  // namespace ballast
