// Rules that join several keys.  Each names the keys, what is wrong and, where it is not plain, the
// remedy.
#include "core/config/deck_rules.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/config/combinations.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "core/model/fp8_specs.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/ulysses_heads.hpp"

namespace ballast {
namespace {

class Rules {
 public:
  explicit Rules(const std::set<Key>& faulty) : faulty_(faulty) {}

  /// Reports a problem of `keys`, unless one of them is faulty.
  void add(std::vector<Key> keys, std::string text, std::string remedy = "") {
    for (const Key& key : keys)
      if (faulty_.count(key) != 0) return;
    list.push_back({std::move(keys), std::move(text), std::move(remedy)});
  }
  /// Problems that a part of the program finds in its options; `more` keys have a part in them.
  void take(std::vector<Problem> found, const std::vector<Key>& more = {}) {
    for (Problem& problem : found) {
      problem.keys.insert(problem.keys.end(), more.begin(), more.end());
      add(std::move(problem.keys), std::move(problem.text), std::move(problem.remedy));
    }
  }
  /// Whether the list ascends strictly, as it must.
  bool ascends(const char* key, const Integers& values) {
    const bool does =
        std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end();
    if (!does) add({key}, fmt::format("{} = {} must ascend", key, to_text(values)));
    return does;
  }
  std::vector<Problem> list;

 private:
  const std::set<Key>& faulty_;
};

void run_rules(const Config& config, Rules& rules) {
  const bool needle = config.data.source == DataSource::needle;
  const char* held_out = needle ? "data.needle_held_out" : "data.validation_share";
  if (config.eval.every_steps > 0 &&
      (needle ? config.data.needle_held_out == 0 : config.data.validation_share == 0))
    rules.add({"eval.every_steps", held_out},
              fmt::format("eval.every_steps = {} needs held-out samples", config.eval.every_steps),
              fmt::format("set {} above 0", held_out));
}

/// Texts that evaluations let the model continue.
void generation_rules(const Config& config, Rules& rules) {
  const GenerateConfig& generate = config.eval.generate;
  if (generate.tokens == 0) return;
  const Texts& prompts = generate.prompts;
  if (prompts.empty() && generate.samples == 0)
    rules.add(
        {"eval.generate_tokens", "eval.generate_prompts", "eval.generate_samples"},
        fmt::format("eval.generate_tokens = {}: there is nothing to continue", generate.tokens),
        "set eval.generate_prompts or eval.generate_samples");
  if (!prompts.empty() && config.data.source != DataSource::files)
    rules.add({"eval.generate_prompts", "data.source"},
              "eval.generate_prompts are texts, and this data has tokens of a tokenizer, which "
              "this program does not run",
              "set eval.generate_samples, whose beginnings are prompts");
  if (std::find(prompts.begin(), prompts.end(), "") != prompts.end())
    rules.add({"eval.generate_prompts"}, "eval.generate_prompts: an empty text is no prompt");
  if (const std::int64_t known = config.model.vocabulary; known > 0 && generate.stop_token >= known)
    rules.add({"eval.generate_stop_token", "model.vocabulary"},
              fmt::format("eval.generate_stop_token = {}: the model writes tokens below its "
                          "vocabulary of {}",
                          generate.stop_token, known));
}

void mesh_rules(const Config& config, Rules& rules) {
  const MeshShape& mesh = config.mesh;
  rules.take(problems(mesh, 0));
  const std::int64_t layers = config.model.layers, heads = config.model.query_heads;
  if (layers > 0 && mesh.pp > layers)
    rules.add(
        {"mesh.pp", "model.layers"},
        fmt::format("mesh.pp = {} is more than the model's {} layers: a stage needs at least one",
                    mesh.pp, layers));
  if (mesh.sp > 1 && heads > 0)
    if (const std::string problem = head_split_problem(heads, mesh.sp); !problem.empty())
      rules.add({"mesh.sp", "model.query_heads"},
                fmt::format("mesh.sp = {}: {}", mesh.sp, problem));
}

void fp8_rules(const Config& config, Rules& rules) {
  const ModelShape shape = model_shape(config);
  if (!config.run.fp8() || shape.layers <= 0) return;
  if (const std::int64_t side = fp8_misfit(shape); side != 0)
    rules.add({"run.precision", "model.hidden", "model.intermediate", "model.head_dim"},
              fmt::format("run.precision = \"fp8\" needs matrices whose sides are multiples of 16, "
                          "and this model has one of {}",
                          side));
}

/// What kernels/cuda/ops reads rows by.
void cuda_width_rules(const ModelShape& shape, Rules& rules) {
  constexpr std::int64_t kElements = 8, kWidest = 16384;
  for (const auto& [key, width] : {std::pair{"model.hidden", shape.hidden},
                                   std::pair{"model.intermediate", shape.intermediate}})
    if (width % kElements != 0)
      rules.add({key, "run.backend"},
                fmt::format("{} = {}: rows on CUDA are read {} elements at a time", key, width,
                            kElements),
                "choose a multiple of 8, or run.backend = \"host\"");
  if (shape.hidden > kWidest)
    rules.add(
        {"model.hidden", "run.backend"},
        fmt::format("model.hidden = {}: norms on CUDA take at most {}", shape.hidden, kWidest),
        "or run.backend = \"host\"");
}

void model_rules(const Config& config, Rules& rules) {
  const bool custom = config.model.preset == "custom";
  const ModelShape shape = model_shape(config);
  for (Problem& problem : problems(shape)) {
    if (custom && config.from.of(problem.keys.front()).origin == Origin::unset)
      problem.remedy = "a custom model states its whole shape, or choose a model.preset";
    problem.text = "model." + problem.text;
    rules.take({problem}, {"model.preset"});
  }
  if (config.run.backend == Backend::cuda) cuda_width_rules(shape, rules);
  // What the attention kernels are written for (kernels/cuda/attention/attention_operations.cpp).
  if (config.run.backend != Backend::cuda || shape.head_dim <= 0 || shape.kv_heads <= 0) return;
  constexpr std::array kHeadDims = {64, 96, 128, 256};
  if (std::find(kHeadDims.begin(), kHeadDims.end(), shape.head_dim) == kHeadDims.end())
    rules.add({"model.head_dim", "run.backend"},
              fmt::format("model.head_dim = {}: attention on CUDA needs 64, 96, 128 or 256",
                          shape.head_dim),
              "choose one, or run.backend = \"host\"");
  if (shape.query_heads / shape.kv_heads > 16)
    rules.add({"model.kv_heads", "model.query_heads", "run.backend"},
              fmt::format("model.kv_heads = {} for {} query heads: attention on CUDA takes at most "
                          "16 query heads a key/value head",
                          shape.kv_heads, shape.query_heads),
              "or run.backend = \"host\"");
}

/// What the data source asks for.
class SourceNeeds {
 public:
  SourceNeeds(const Config& config, Rules& rules) : config_(config), rules_(rules) {}
  void operator()(const char* key, bool there, const char* what) const {
    if (!there)
      rules_.add({"data.source", key}, fmt::format("data.source = \"{}\" needs {}: {}",
                                                   name(config_.data.source), key, what));
  }

 private:
  const Config& config_;
  Rules& rules_;
};

void distribution_rules(const Config& config, Rules& rules) {
  const DataConfig& data = config.data;
  const SourceNeeds needs(config, rules);
  needs("data.bin_tokens", !data.bin_tokens.empty(), "upper edges of the length bins");
  needs("data.samples", data.samples > 0, "how many samples to draw");
  if (data.bin_tokens.size() != data.bin_share.size())
    rules.add({"data.bin_share", "data.bin_tokens"},
              fmt::format("data.bin_share has {} values for {} bins in data.bin_tokens",
                          data.bin_share.size(), data.bin_tokens.size()));
  rules.ascends("data.bin_tokens", data.bin_tokens);
  const std::int64_t least = std::max<std::int64_t>(1, data.min_tokens);
  if (!data.bin_tokens.empty() && data.bin_tokens.front() < least)
    rules.add({"data.bin_tokens", "data.min_tokens"},
              fmt::format("data.bin_tokens begins with {}, below data.min_tokens = {}",
                          data.bin_tokens.front(), least));
  double sum = 0;
  for (double share : data.bin_share) sum += share;
  if (!data.bin_share.empty() && !(sum > 0 && std::isfinite(sum)))
    rules.add({"data.bin_share"},
              fmt::format("data.bin_share = {} must have a positive sum", to_text(data.bin_share)));
}

void needle_rules(const Config& config, Rules& rules) {
  const SourceNeeds needs(config, rules);
  needs("data.samples", config.data.samples > 0, "how many samples to draw for training");
  rules.take(problems(needle_options(config)), {"data.needle_lengths", "data.source"});
  if (config.data.validation_share > 0)
    rules.add({"data.validation_share", "data.source"},
              "data.validation_share does not apply to data.source = \"needle\", whose held-out "
              "samples have streams of their own",
              "set data.needle_held_out");
  const auto whole = [&](const char* key, bool cuts) {
    if (cuts)
      rules.add(
          {key, "data.source"},
          fmt::format("{} does not apply to data.source = \"needle\": samples are never cut", key),
          "set data.needle_lengths");
  };
  whole("data.max_tokens", config.data.max_tokens != 0);
  whole("data.min_tokens", config.data.min_tokens != 1);
}

void data_rules(const Config& config, Rules& rules) {
  const DataConfig& data = config.data;
  const SourceNeeds needs(config, rules);
  switch (data.source) {
    case DataSource::files:
      needs("data.paths", !data.paths.empty(), "folders or files to read");
      if (const std::int64_t vocabulary = config.model.vocabulary;
          vocabulary > 0 && vocabulary < 256)
        rules.add({"model.vocabulary", "data.source", "model.preset"},
                  fmt::format("model.vocabulary = {} is below the 256 token ids of byte-level data "
                              "(data.source = \"files\")",
                              vocabulary));
      break;
    case DataSource::megatron:
      needs("data.path", !data.path.empty(), "the common stem of the .bin and .idx files");
      break;
    case DataSource::hdf5:
      needs("data.path", !data.path.empty(), "the HDF5 file");
      break;
    case DataSource::lengths:
      needs("data.lengths_file", !data.lengths_file.empty() || !data.lengths.empty(),
            "a text file with one length a line (or data.lengths, a list)");
      if (!data.lengths_file.empty() && !data.lengths.empty())
        rules.add({"data.lengths", "data.lengths_file"},
                  "data.lengths and data.lengths_file exclude each other", "keep one");
      break;
    case DataSource::distribution:
      distribution_rules(config, rules);
      break;
    case DataSource::needle:
      needle_rules(config, rules);
      break;
  }
  if (data.max_tokens > 0 && data.min_tokens > data.max_tokens)
    rules.add(
        {"data.min_tokens", "data.max_tokens"},
        fmt::format("data.min_tokens = {} is above data.max_tokens = {}: no sample would be left",
                    data.min_tokens, data.max_tokens));
}

/// loss.kind = "dpo": documents come as pairs that nothing may part.
void pair_rules(const Config& config, DeckNeeds needs, Rules& rules) {
  if (!trains_pairs(config)) return;
  const DataConfig& data = config.data;
  if (needs.executes && config.dpo.reference.empty() && !config.dpo.reference_free)
    rules.add(
        {"dpo.reference", "loss.kind"},
        "loss.kind = \"dpo\" needs dpo.reference, the log probabilities of the model that "
        "training begins with",
        "name a file and write it with `ballast reference`, or set dpo.reference_free = true");
  if (!config.dpo.reference.empty() && config.dpo.reference_free)
    rules.add({"dpo.reference_free", "dpo.reference"},
              fmt::format("dpo.reference_free = true does without dpo.reference = \"{}\"",
                          config.dpo.reference),
              "state one of them");
  if (data.source == DataSource::needle || data.source == DataSource::distribution)
    rules.add(
        {"data.source", "loss.kind"},
        fmt::format("data.source = \"{}\" has no pairs for loss.kind = \"dpo\"", name(data.source)),
        "set \"hdf5\", \"megatron\" or \"files\": documents 2 i and 2 i + 1 are pair i");
  if (data.max_tokens > 0 && data.long_samples != LongDocuments::truncate)
    rules.add({"data.long", "data.max_tokens", "loss.kind"},
              fmt::format("data.long = \"{}\" would part the pairs of loss.kind = \"dpo\"",
                          name(data.long_samples)),
              "set data.long = \"truncate\"");
  if (data.min_tokens > 1)
    rules.add({"data.min_tokens", "loss.kind"},
              "data.min_tokens would part the pairs of loss.kind = \"dpo\"");
  if (config.batching.method == Batching::hbp && config.batching.long_samples == LongSamples::split)
    rules.add({"batching.long", "loss.kind"},
              "batching.long = \"split\" would cut the pairs of loss.kind = \"dpo\"",
              "set \"refuse\"");
}

/// Groups to try lie side by side on the data-parallel ranks.
void ranks_divide(const Config& config, Rules& rules) {
  for (const std::int64_t ranks : config.batching.select_ranks)
    if (config.mesh.dp % ranks != 0)
      rules.add({"batching.select_ranks", "mesh.dp"},
                fmt::format("batching.select_ranks: {} does not divide mesh.dp = {}", ranks,
                            config.mesh.dp));
}

void selection_rules(const Config& config, Rules& rules) {
  const BatchingConfig& batching = config.batching;
  rules.ascends("batching.select_lengths", batching.select_lengths);
  rules.ascends("batching.select_ranks", batching.select_ranks);
  ranks_divide(config, rules);
  if (!batching.select_lengths.empty() && config.mesh.pp > 1)
    rules.add(
        {"batching.select_lengths", "mesh.pp"},
        fmt::format(
            "batching.select_lengths: groups are selected for packs that run through the whole "
            "model on a rank, not through {} stages",
            config.mesh.pp),
        "set mesh.pp = 1 or state batching.groups");
}

/// The stated packing groups.
void group_rules(const Config& config, Rules& rules) {
  const auto counted = [&](const char* key, std::size_t size) {
    const std::size_t groups = config.batching.groups.size();
    if (size > 0 && size != groups)
      rules.add(
          {key, "batching.groups"},
          fmt::format("{} has {} values for {} groups in batching.groups", key, size, groups));
  };
  counted("batching.group_ranks", config.batching.group_ranks.size());
  counted("batching.group_recompute", config.batching.group_recompute.size());
  const std::vector<PackGroup> groups = pack_groups(config);
  rules.take(problems(groups, config.mesh.dp), {"batching.method", "mesh.dp"});
  const std::int64_t layers = config.model.layers;
  for (const PackGroup& group : groups)
    if (layers > 0 && group.recompute_layers > layers)
      rules.add({"batching.group_recompute", "model.layers"},
                fmt::format("batching.group_recompute = {} is more than the model's {} layers",
                            group.recompute_layers, layers));
}

/// What no group holds is split: what data.max_tokens would do with it first is another thing.
void split_rules(const Config& config, Rules& rules) {
  const Integers& groups = config.batching.groups;
  if (config.batching.long_samples == LongSamples::split && !groups.empty() &&
      config.data.max_tokens > groups.back() && config.data.long_samples != LongDocuments::split)
    rules.add({"data.max_tokens", "batching.long", "batching.groups"},
              fmt::format("data.max_tokens = {} is above the longest group's {} tokens, at which "
                          "batching.long = \"split\" cuts",
                          config.data.max_tokens, groups.back()),
              "set data.max_tokens = 0, or no more than the longest group holds");
}

void batching_rules(const Config& config, DeckNeeds needs, Rules& rules) {
  const BatchingConfig& batching = config.batching;
  const bool hbp = batching.method == Batching::hbp;
  if (config.curriculum.steps > 0 && config.curriculum.max_tokens == 0 && !hbp)
    rules.add({"curriculum.steps", "curriculum.max_tokens"},
              "curriculum.steps needs curriculum.max_tokens, the longest sample of those steps: "
              "batching.method has no packing groups to take it from");
  if (batching.method == Batching::balanced) ranks_divide(config, rules);
  if (!hbp) return;  // a deck may state groups for its other cases
  if (batching.groups_from == GroupSource::deck) split_rules(config, rules);
  selection_rules(config, rules);
  if (batching.groups_from == GroupSource::profile) {  // the stated ones are for other cases
    if (config.profile.table.empty())
      rules.add({"batching.groups_from", "profile.table"},
                "batching.groups_from = \"profile\" needs profile.table, which `ballast plan` "
                "stores selected groups in");
    return;
  }
  const bool selected_later =
      batching.groups.empty() &&
      (needs.chooses_groups || (!batching.select_lengths.empty() && !needs.groups));
  if (!selected_later) group_rules(config, rules);
}

void causal_rules(const Config& config, const AttentionOptions& attention, Rules& rules) {
  if (attention.stretch % kBlock != 0)
    rules.add({"attention.stretch"},
              fmt::format("attention.stretch = {} must be a multiple of {} tokens",
                          attention.stretch, kBlock));
  if (attention.last_q > attention.stretch)
    rules.add({"attention.last_q", "attention.stretch"},
              fmt::format("attention.last_q = {} is above attention.stretch = {}: the queries that "
                          "choose for a stretch are the last of the one before",
                          attention.last_q, attention.stretch));
  if (config.batching.method == Batching::chunkflow && config.chunk.tokens % attention.stretch != 0)
    rules.add({"chunk.tokens", "attention.stretch"},
              fmt::format("chunk.tokens = {}: attention.selection = \"causal\" needs chunks of a "
                          "multiple of attention.stretch = {} tokens",
                          config.chunk.tokens, attention.stretch));
  if (config.batching.method == Batching::balanced &&
      config.batching.micro_batch_tokens * config.mesh.dp < attention.stretch)
    rules.add(
        {"batching.micro_batch_tokens", "attention.stretch"},
        fmt::format("batching.micro_batch_tokens = {}: with attention.selection = \"causal\" "
                    "mesh.dp ranks must hold at least attention.stretch = {} tokens, at whose "
                    "multiples longer samples are cut",
                    config.batching.micro_batch_tokens, attention.stretch));
}

void attention_rules(const Config& config, Rules& rules) {
  const AttentionOptions attention = attention_options(config);
  const std::int64_t align = attention.align();
  for (const auto& [key, tokens] : {std::pair{"attention.moba_block", attention.moba_block},
                                    {"attention.xattention_block", attention.xattention_block}})
    if (tokens % kBlock != 0)
      rules.add({key}, fmt::format("{} = {} must be a multiple of {} tokens", key, tokens, kBlock));
  if (kBlock % attention.xattention_stride != 0)
    rules.add({"attention.xattention_stride"},
              fmt::format("attention.xattention_stride = {} must divide {}",
                          attention.xattention_stride, kBlock));
  if (attention.index == IndexOrigin::recorded && config.attention.recorded.empty())
    rules.add(
        {"attention.recorded", "attention.index"},
        "attention.index = \"recorded\" needs attention.recorded, the folder of indexes that a "
        "run with trace.indexes_every wrote");
  if (attention.pattern == PatternKind::by_head && attention.chosen() &&
      config.attention.heads.empty())
    rules.add({"attention.heads", "attention.pattern"},
              "attention.pattern = \"by_head\" needs attention.heads, the file that `ballast bench "
              "heads DECK out=FILE` writes");
  if (attention.causal()) causal_rules(config, attention, rules);
  if (!attention.sparse()) return;
  if (deals_stripes(config.ring.layout) && config.ring.stripe % align != 0)
    rules.add({"ring.stripe", "ring.layout", "attention.pattern", "attention.index"},
              fmt::format("ring.stripe = {}: sparse attention computes blocks of {} tokens, which "
                          "stripes must not cut",
                          config.ring.stripe, align),
              fmt::format("set a multiple of {}, or attention.pattern = \"dense\" with "
                          "attention.index = \"pattern\"",
                          align));
  if (config.batching.method == Batching::chunkflow && config.chunk.tokens % align != 0)
    rules.add(
        {"chunk.tokens", "attention.pattern", "attention.index"},
        fmt::format("chunk.tokens = {}: sparse attention needs chunks of a multiple of {} tokens",
                    config.chunk.tokens, align));
}

void optimizer_rules(const Config& config, Rules& rules) {
  const OptimizerConfig& o = config.optimizer;
  const bool decays = o.schedule != LearningRateSchedule::constant;
  if (decays && o.minimum_learning_rate > o.learning_rate)
    rules.add(
        {"optimizer.minimum_learning_rate", "optimizer.learning_rate"},
        fmt::format("optimizer.minimum_learning_rate = {} is above optimizer.learning_rate = {}",
                    o.minimum_learning_rate, o.learning_rate));
  if (decays && o.decay_steps > 0 && o.warmup_steps > o.decay_steps)
    rules.add({"optimizer.warmup_steps", "optimizer.decay_steps"},
              fmt::format("optimizer.warmup_steps = {} is above optimizer.decay_steps = {}: the "
                          "decay would end before it begins",
                          o.warmup_steps, o.decay_steps));
  const LearningRate rate = learning_rate(config);
  if (rate.schedule == LearningRateSchedule::wsd &&
      rate.warmup_steps + rate.wsd_decay_steps > rate.decay_steps)
    rules.add({"optimizer.wsd_decay_steps", "optimizer.warmup_steps", "optimizer.decay_steps"},
              fmt::format("optimizer.schedule = \"wsd\": {} steps of warm-up and {} of decay are "
                          "more than the {} until the decay ends",
                          rate.warmup_steps, rate.wsd_decay_steps, rate.decay_steps));
  if (config.checkpoint.best && config.eval.every_steps == 0)
    rules.add({"checkpoint.best", "eval.every_steps"},
              "checkpoint.best = true goes by the held-out loss, which eval.every_steps = 0 never "
              "measures",
              "set eval.every_steps, and data.validation_share above 0");
  const std::int64_t all = config.model.layers;
  if (config.recompute.mode != Recompute::none && all > 0 && config.recompute.layers > all)
    rules.add({"recompute.layers", "model.layers"},
              fmt::format("recompute.layers = {} is more than the model's {} layers",
                          config.recompute.layers, all),
              "-1 means all");
}

void cost_rules(const Config& config, Rules& rules) {
  const auto carries = [&](const char* level, double forward, double backward) {
    const std::string forward_key = fmt::format("costs.forward_{}_hop_ms", level),
                      backward_key = fmt::format("costs.backward_{}_hop_ms", level);
    if (backward < forward)
      rules.add({backward_key, forward_key},
                fmt::format("{} = {} is below {} = {}: backward's hop carries KV and dKV, "
                            "forward's KV alone",
                            backward_key, backward, forward_key, forward));
  };
  const RingPassConfig &forward = config.costs.forward, &backward = config.costs.backward;
  carries("inner", forward.inner_hop_ms, backward.inner_hop_ms);
  carries("outer", forward.outer_hop_ms, backward.outer_hop_ms);
  if (states_times(config) || !config.profile.table.empty() || config.model.layers == 0) return;
  // Built-in rates time a model then, and would leave these unread.
  for (const char* key :
       {"costs.backward_over_forward", "costs.exchange_token_s", "costs.ring_hop_token_s",
        "costs.forward_micro_batch_s", "costs.stage_hop_token_s"})
    if (config.from.of(key).origin != Origin::unset)
      rules.add({key, "costs.forward_token_s", "costs.forward_pair_s"},
                fmt::format("{} has no effect without costs.forward_token_s or "
                            "costs.forward_pair_s: built-in rates time the plans",
                            key),
                "state what a token or a pair takes");
}

void dst_rules(const Config& config, Rules& rules) {
  const DstConfig& dst = config.dst;
  if (dst.enabled && config.attention.pattern == PatternKind::vertical_slash &&
      dst.base_budget == 0)
    rules.add({"dst.base_budget", "dst.enabled"},
              "dst.base_budget = 0: vertical_slash has no fixed budget",
              "state the one that tuning starts from");
  if (dst.enabled && dst.coverage_rows == CoverageRows::sampled &&
      config.attention.pattern == PatternKind::vertical_slash &&
      config.run.backend == Backend::cuda)
    rules.add({"dst.coverage_rows", "run.backend"},
              "dst.coverage_rows = \"sampled\" is weighed on the host so far",
              "set \"last\", or run.backend = \"host\"");
  const bool ascending = rules.ascends("dst.budgets", dst.budgets);
  const std::int64_t base = dst.base_budget == 0 ? config.attention.moba_top_k : dst.base_budget;
  if (dst.enabled && ascending && !dst.budgets.empty() &&
      !std::binary_search(dst.budgets.begin(), dst.budgets.end(), base))
    rules.add(
        {"dst.budgets", "dst.base_budget"},
        fmt::format("dst.budgets = {} lacks dst.base_budget = {}", to_text(dst.budgets), base));
}

void profile_rules(const Config& config, Rules& rules) {
  const ProfileConfig& profile = config.profile;
  rules.ascends("profile.lengths", profile.lengths);
  rules.ascends("profile.prefixes", profile.prefixes);
  rules.ascends("profile.budgets", profile.budgets);
  const auto whole_blocks = [&](const char* key, const Integers& list) {
    if (std::any_of(list.begin(), list.end(), [](std::int64_t n) { return n % kBlock != 0; }))
      rules.add({key},
                fmt::format("{} = {} must be multiples of {} with attention.pattern = \"{}\"", key,
                            to_text(list), kBlock, name(config.attention.pattern)));
  };
  if (config.attention.pattern != PatternKind::dense) {
    whole_blocks("profile.lengths", profile.lengths);
    whole_blocks("profile.prefixes", profile.prefixes);
  }
  if (profile.recompute.empty())
    rules.add({"profile.recompute"}, "profile.recompute is empty", "name at least \"none\"");
  if (std::set(profile.recompute.begin(), profile.recompute.end()).size() <
      profile.recompute.size())
    rules.add({"profile.recompute"}, "profile.recompute names a mode twice", "name each once");
}

}  // namespace

std::vector<Problem> problems(const Config& config, DeckNeeds needs, const std::set<Key>& faulty) {
  Rules rules(faulty);
  run_rules(config, rules);
  mesh_rules(config, rules);
  if (needs.model || config.is_set(&Config::model)) {
    model_rules(config, rules);
    fp8_rules(config, rules);
  }
  if (needs.data || config.is_set(&Config::data)) {
    data_rules(config, rules);
    generation_rules(config, rules);
  }
  batching_rules(config, needs, rules);
  pair_rules(config, needs, rules);
  attention_rules(config, rules);
  optimizer_rules(config, rules);
  if (config.is_set(&Config::lora)) rules.take(problems(lora_options(config)));
  if (config.is_set(&Config::costs)) cost_rules(config, rules);
  if (config.is_set(&Config::profile)) profile_rules(config, rules);
  if (config.is_set(&Config::dst)) dst_rules(config, rules);
  const CostsConfig& costs = config.costs;
  const bool timed =
      costs.forward_token_s > 0 && costs.forward_pair_s > 0 && costs.backward_over_forward > 0;
  if (predicts_latency(config) && config.profile.table.empty() && !timed)
    rules.add({"dst.enabled", "batching.method"},
              "dst.enabled and batching.method = \"sab\" predict latency: name a profile.table "
              "(`ballast profile` measures one), or state costs.forward_token_s and "
              "costs.forward_pair_s above 0 (costs.backward_over_forward is 2 unless stated)");
  rules.take(refused_combinations(config, needs.executes));
  return rules.list;
}

std::string placed(const Problem& problem, const Provenance& from) {
  std::string place = from.file.empty() ? "deck" : from.file;
  for (const Key& key : problem.keys)
    if (const auto setting = from.of(key);
        setting.origin != Origin::unset && setting.origin != Origin::preset) {
      place = setting.place;
      break;
    }
  return place + ": " + problem.message();
}

}  // namespace ballast
