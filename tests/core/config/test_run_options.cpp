// Options of the parts of the program: every key of their blocks changes what they are told.
#include <gtest/gtest.h>

#include <set>

#include "core/config/deck.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "core/config/step_options.hpp"
#include "core/model/parameter_table.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "tests/core/config/other_value.hpp"

namespace ballast {
namespace {

/// All options that run_options makes of a Config, as one text.
class OptionsText {
 public:
  std::string text;

  template <class... T>
  void add(const T&... values) {
    (put(values), ...);
  }
  void add(const ModelShape& m) {
    add(m.preset, m.layers, m.hidden, m.intermediate, m.query_heads, m.kv_heads, m.head_dim,
        m.vocabulary, m.qkv_bias, m.qk_norm, m.tied_embedding, m.rms_eps, m.initial_std,
        m.rope_theta, m.yarn_factor, m.original_context, m.llama3_factor, m.llama3_low,
        m.llama3_high);
    add(m.lora.rank, m.lora.alpha, m.lora.dropout, m.lora.projections, m.lora.seed);
  }
  void add(const DataOptions& d) {
    add(d.source, d.paths, d.extensions, d.path, d.mask_path, d.lengths_file, d.lengths,
        d.bin_tokens, d.bin_share, d.samples, d.max_tokens, d.min_tokens, d.long_samples,
        d.needle_held_out, d.seed, d.vocabulary);
    const NeedleOptions& n = d.needle;
    add(n.lengths, n.length_share, n.held_out_share, n.pairs, n.questions, n.keys, n.values,
        n.value_tokens, n.vocabulary, n.task, n.repeats, n.copies, n.seed, n.closing);
  }
  void add(const BatchingOptions& b) {
    add(b.method, b.micro_batch_tokens, b.dp, b.pair_cost_tokens, b.packing, b.balance, b.seed,
        b.micro_batch_samples, b.align);
    for (const PlacementSplit& s : b.splits) add(s.ranks, s.sp, s.ring);
    for (const PackGroup& g : b.groups) add(g.tokens, g.ranks, g.recompute_layers);
  }
  void add(const AttentionOptions& a) {
    add(a.pattern, a.index, a.vertical_share, a.slash_share, a.last_q, a.selection, a.stretch,
        a.max_columns, a.max_slashes, a.moba_block, a.moba_top_k, a.xattention_block,
        a.xattention_stride, a.xattention_threshold, a.flex_threshold, a.flex_share,
        a.generator.density, a.generator.band_tokens, a.generator.columns, a.generator.seed,
        a.generator.heads);
  }
  void add(const PipelineOptions& p) {
    add(p.schedule, p.stages, p.k, p.search, p.offload, p.costs.token_s, p.costs.pair_s,
        p.costs.micro_batch_s, p.costs.backward_over_forward, p.costs.weight_share,
        p.costs.hop_token_s);
  }
  void add(const MeshShape& m) {
    add(m.dp, m.pp, m.cp_outer, m.cp_inner, m.sp, m.tp, m.ranks_per_node);
  }

 private:
  template <class T>
  void put(const T& value) {
    if constexpr (NamedEnum<T>)
      text += fmt::format("{} ", name(value));
    else
      text += fmt::format("{} ", value);
  }
  template <class T>
  void put(const std::vector<T>& list) {
    text += '[';
    for (const T& value : list) put(value);
    text += "] ";
  }
};

std::string options_text(const Config& config) {
  const RunOptions o = RunOptions::from(config);
  OptionsText all;
  all.add(o.mesh);
  all.add(o.model);
  all.add(data_options(config));
  all.add(o.batching);
  all.add(o.attention);
  all.add(o.pipeline);
  all.add(o.normaliser, o.layout.rule.kind, o.layout.rule.stripe, o.layer_begin, o.joined_ranks());
  all.add(o.window.steps, o.window.rule, o.window.global_tokens, o.window.global_samples);
  all.add(o.curriculum.steps, o.curriculum.max_tokens, o.curriculum.global_tokens,
          o.curriculum.global_samples);
  all.add(budget_pattern(config), budget_block_tokens(config), takes_stored_groups(config),
          lacks_groups(config), ranks_share_packs(config));
  return all.text;
}

/// Makes `deck` one that reads the key, by the schema's `when`.
void switch_on(Deck& deck, const KeySpec& spec) {
  for (const ReadWhen& when : spec.when) {
    const SwitchedOn& one = when.front();
    const KeySpec& by = key_filling(one.switch_member);
    switch_on(deck, by);
    deck.set(by.path(), one.except ? other_value(by) : one.values.front(), "deck.toml:1");
  }
}

/// Keys of these blocks that commands and executors read from the Config itself.
const std::set<std::string> kReadAsTheyAre{
    "attention.expected_sparsity",
    "attention.heads",
    "attention.recorded",
    "model.head_chunk_tokens",
    "data.validation_share",
    "batching.shuffle",
    "batching.scope",
    "batching.select_lengths",
    "batching.select_ranks",
    "batching.select_memory_gib",
    "batching.select_refine",
    "chunk.window_tokens",
    "chunk.search_tokens",
    "chunk.search_k",
    "chunk.search_steps",
    "chunk.search_memory_gib",
    "pipeline.plan_steps",
};

TEST(RunOptions, EveryKeyOfTheirBlocksChangesThem) {
  const std::set<std::string> blocks{"mesh",      "model", "data",      "batching",
                                     "chunk",     "loss",  "ring",      "pipeline",
                                     "attention", "lora",  "curriculum"};
  std::set<std::string> as_they_are;
  for (const KeySpec& spec : deck_schema()) {
    if (blocks.count(spec.block) == 0) continue;
    Deck deck;
    deck.set("model.layers", std::int64_t{6}, "deck.toml:1");
    deck.set("batching.groups", std::vector<std::int64_t>{64, 256}, "deck.toml:1");
    switch_on(deck, spec);
    const std::string before = options_text(deck.config());
    deck.set(spec.path(), other_value(spec), "deck.toml:2");
    if (options_text(deck.config()) == before) as_they_are.insert(spec.path());
  }
  EXPECT_EQ(as_they_are, kReadAsTheyAre);
}

TEST(RunOptions, SchedulesBoundLiveChunksWhereSamplesAreCut) {
  Config config;
  config.chunk.k = 3;
  const auto chosen = [&](Batching method, int stages) {
    config.batching.method = method, config.mesh.pp = stages;
    return pipeline_options(config).schedule;
  };
  const auto chunks_kept = [&] { return batching_options(config).chunk_k; };
  for (const int stages : {1, 4}) {
    EXPECT_EQ(chosen(Batching::chunkflow, stages), ScheduleKind::state_aware_1f1b);
    EXPECT_EQ(chosen(Batching::packed, stages), ScheduleKind::one_f_one_b);
    EXPECT_EQ(chosen(Batching::balanced, stages), ScheduleKind::state_aware_1f1b);
    EXPECT_EQ(chunks_kept(), 3);
  }
  config.pipeline.schedule = ScheduleKind::one_f_one_b;
  EXPECT_EQ(chosen(Batching::balanced, 1), ScheduleKind::one_f_one_b);
  EXPECT_GT(chunks_kept(), 1 << 20);
}

TEST(RunOptions, StagesAndLayoutsCountAttention) {
  Deck deck;
  deck.set("model.preset", std::string("qwen2.5-0.5b"), "deck.toml:1");
  Config config = deck.config();
  config.mesh.pp = 4, config.mesh.cp_inner = 2;
  config.batching.micro_batch_tokens = 65536;
  const ModelShape model = model_shape(config);
  // A full pack's tokens see half of it on average, and the head counts as well.
  EXPECT_EQ(layer_begin(config), balance_stages(24, 4, part_costs(model, 32768)));
  EXPECT_NE(layer_begin(config), balance_stages(24, 4, part_costs(model, 0)));
  EXPECT_DOUBLE_EQ(RunOptions::from(config).layout.token_pairs, 1 / pair_cost_tokens(model));
  EXPECT_GT(window_options(config).token_pairs, 0);
  config.batching.method = Batching::hbp;
  config.batching.groups = {512, 4096};
  config.curriculum.steps = 3;
  EXPECT_EQ(curriculum(config).max_tokens, 512) << "of the first group";
}

TEST(RunOptions, AdaptersAndHalfMomentsAreWhatPlansReduceAndTime) {
  Deck deck;
  deck.set("model.preset", std::string("qwen2.5-0.5b"), "deck.toml:1");
  deck.set("lora.rank", std::int64_t{8}, "deck.toml:2");
  deck.set("optimizer.moments", std::string("bf16"), "deck.toml:3");
  const Config config = deck.config();
  const RunOptions options = RunOptions::from(config);
  std::int64_t trained = 0, all = 0;
  for (const Parameter& p : parameter_table(options.model, {0}))
    trained += p.trainable ? p.numel() : 0, all += p.numel();
  const StepOptions step = step_options(config, options);
  EXPECT_EQ(step.stage_elements, std::vector<std::int64_t>{trained});
  EXPECT_LT(trained, all / 20);
  EXPECT_EQ(work_shape(config, nullptr).moment_bytes, 2);
}

// Times of a ring's passes are for tables of rings; plans of a model go by what a token or a pair
// takes.
TEST(RunOptions, CostsAreStatedWhereATokenOrAPairIs) {
  const auto source = [](const char* key, bool model) {
    Deck deck;
    if (model) deck.set("model.preset", std::string("qwen2.5-0.5b"), "deck.toml:1");
    if (*key) deck.set(key, 1e-6, "deck.toml:2");
    const Config config = deck.config();
    const std::string name = stated_costs(config, nullptr)->source();
    EXPECT_EQ(states_times(config), name == "stated costs") << key;
    return name;
  };
  for (const char* key : {"costs.forward_token_s", "costs.forward_pair_s"})
    for (const bool model : {false, true}) EXPECT_EQ(source(key, model), "stated costs") << key;
  for (const char* key : {"", "costs.forward_compute_ms", "costs.backward_inner_hop_ms"}) {
    EXPECT_EQ(source(key, true), "built-in rates of a host core") << key;
    EXPECT_EQ(source(key, false), "no costs stated: 1 us a token") << key;
  }
}

TEST(RunOptions, GroupsOfAnotherMethodCutNoSamples) {
  Config config;
  config.batching.groups = {64, 256};
  config.batching.long_samples = LongSamples::split;
  config.batching.method = Batching::packed;
  EXPECT_EQ(data_options(config).max_tokens, 0);
  config.batching.method = Batching::hbp;
  EXPECT_EQ(data_options(config).max_tokens, 256);
}

TEST(RunOptions, MemoryKnowsTunedBudgetsAndWeightsOfPairs) {
  Config config;
  config.model.layers = 2, config.model.hidden = 64, config.model.intermediate = 128;
  config.model.query_heads = config.model.kv_heads = 4, config.model.head_dim = 16;
  config.model.vocabulary = 256;
  config.mesh.pp = 2;
  config.attention.pattern = PatternKind::moba;
  config.attention.moba_block = 256, config.attention.moba_top_k = 4;
  const auto stages = [&] { return stage_memories(config, RunOptions::from(config)); };
  EXPECT_EQ(stages()[0].dense_keys, 4 * 256);
  config.dst.enabled = true;
  config.dst.budgets = {2, 4, 12};
  EXPECT_EQ(stages()[0].dense_keys, 12 * 256) << "short micro-batches may gain up to there";
  EXPECT_FALSE(stages()[1].weighted);
  config.loss.kind = LossKind::dpo;
  EXPECT_FALSE(stages()[0].weighted);
  EXPECT_TRUE(stages()[1].weighted) << "the loss weighs each answer";
}

TEST(RunOptions, StagesThatShareAnEmbeddingExchangeItsGradient) {
  Config config;
  ModelConfig& model = config.model;
  model.layers = 24, model.hidden = 896, model.intermediate = 4864, model.vocabulary = 151936;
  model.query_heads = 14, model.kv_heads = 2, model.head_dim = 64, model.tied_embedding = true;
  config.run.backend = Backend::cuda;
  config.run.precision = Precision::bf16;
  config.mesh.dp = 4;
  const auto exchanged = [&](int stages, int zero, StatePrecision gradients) {
    config.mesh.pp = stages, config.optimizer.zero = zero, config.optimizer.gradients = gradients;
    std::vector<std::int64_t> bytes;
    for (const StageMemory& stage : stage_memories(config, RunOptions::from(config)))
      bytes.push_back(stage.overlap_bytes);
    return bytes;
  };
  const std::int64_t elements = std::int64_t{151936} * 896;
  using Bytes = std::vector<std::int64_t>;
  for (const StatePrecision kept : {StatePrecision::full, StatePrecision::bf16}) {
    const std::int64_t width = kept == StatePrecision::bf16 ? 2 : 4;
    EXPECT_EQ(exchanged(1, 0, kept), Bytes{0});
    EXPECT_EQ(exchanged(2, 0, kept), Bytes({elements * width, elements * width}));
    // The last stage's copy has the final norm in its bucket.
    const std::int64_t last = (elements + model.hidden) / 4;
    EXPECT_EQ(exchanged(3, 1, kept), Bytes({elements / 4 * width, 0, last * width}));
    // ZeRO 2 sums up in fp32 whatever travels.
    EXPECT_EQ(exchanged(2, 2, kept), Bytes({elements, last * 4}));
  }
  config.optimizer.kind = OptimizerKind::muon;  // one bucket, whose slices differ
  for (const std::int64_t bytes : exchanged(2, 1, StatePrecision::full)) {
    EXPECT_GT(bytes, elements / 4 * 4);
    EXPECT_LE(bytes, elements * 4);
  }
  model.tied_embedding = false;
  EXPECT_EQ(exchanged(2, 1, StatePrecision::full), Bytes({0, 0}));
}

}  // namespace
}  // namespace ballast
