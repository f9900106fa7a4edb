#include "core/config/run_options.hpp"

#include <algorithm>
#include <set>

#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/context_split.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/predict/placement_costs.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/predict/stated_costs.hpp"

namespace ballast {

LoraOptions lora_options(const Config& config) {
  const LoraConfig& l = config.lora;
  return {l.rank, l.alpha, l.dropout, l.projections, config.run.seed};
}

ModelShape model_shape(const Config& config) {
  const ModelConfig& m = config.model;
  ModelShape shape;
  shape.preset = m.preset == "custom" && !m.weights.empty() ? m.weights : m.preset;
  shape.layers = m.layers;
  shape.hidden = m.hidden;
  shape.intermediate = m.intermediate;
  shape.query_heads = m.query_heads;
  shape.kv_heads = m.kv_heads;
  shape.head_dim = m.head_dim;
  shape.vocabulary = m.vocabulary;
  shape.qkv_bias = m.qkv_bias;
  shape.qk_norm = m.qk_norm;
  shape.tied_embedding = m.tied_embedding;
  shape.rms_eps = m.rms_eps;
  shape.initial_std = m.initial_std;
  shape.rope_theta = m.rope_theta;
  shape.yarn_factor = m.yarn_factor;
  shape.original_context = m.original_context;
  shape.llama3_factor = m.llama3_factor;
  shape.llama3_low = m.llama3_low;
  shape.llama3_high = m.llama3_high;
  shape.lora = lora_options(config);
  return shape;
}

NeedleOptions needle_options(const Config& config) {
  const DataConfig& d = config.data;
  NeedleOptions options;
  options.task = d.needle_task;
  if (!d.needle_repeats.empty()) options.repeats = d.needle_repeats;
  if (!d.needle_copies.empty()) options.copies = d.needle_copies;
  options.lengths = d.needle_lengths;
  options.length_share = d.needle_length_share;
  options.held_out_share = d.needle_held_out_share;
  if (!d.needle_pairs.empty()) options.pairs = d.needle_pairs;
  if (!d.needle_questions.empty()) options.questions = d.needle_questions;
  options.keys = d.needle_keys;
  options.values = d.needle_values;
  options.closing = d.needle_closing;
  options.value_tokens = d.needle_value_tokens;
  options.vocabulary = config.model.vocabulary;
  options.seed = config.run.seed;
  return options;
}

bool trains_pairs(const Config& config) { return config.loss.kind == LossKind::dpo; }

bool predicts_latency(const Config& config) {
  return config.dst.enabled || config.batching.method == Batching::sab;
}

bool states_times(const Config& config) {
  return config.is_set(&Config::costs, &CostsConfig::forward_token_s) ||
         config.is_set(&Config::costs, &CostsConfig::forward_pair_s);
}

DataOptions data_options(const Config& config) {
  const DataConfig& d = config.data;
  DataOptions options;
  options.source = d.source;
  options.paths = d.paths;
  options.extensions = d.extensions;
  options.path = d.path;
  options.mask_path = d.mask_path;
  options.lengths_file = d.lengths_file;
  options.lengths = d.lengths;
  options.bin_tokens = d.bin_tokens;
  options.bin_share = d.bin_share;
  options.samples = d.samples;
  options.max_tokens = d.max_tokens;
  options.min_tokens = d.min_tokens;
  options.long_samples = d.long_samples;
  options.pairs = trains_pairs(config);
  const Integers& groups = config.batching.groups;
  if (config.batching.method == Batching::hbp &&
      config.batching.long_samples == LongSamples::split && !groups.empty() &&
      (options.max_tokens == 0 || options.max_tokens > groups.back())) {
    options.max_tokens = groups.back();
    options.long_samples = LongDocuments::split;
  }
  options.needle = needle_options(config);
  options.needle_held_out = d.needle_held_out;
  options.seed = config.run.seed;
  options.vocabulary = config.model.vocabulary;
  options.tokenizer = config.model.weights;
  return options;
}

std::vector<PackGroup> pack_groups(const Config& config) {
  const BatchingConfig& b = config.batching;
  std::vector<PackGroup> groups;
  for (std::size_t g = 0; g < b.groups.size(); ++g)
    groups.push_back({b.groups[g],
                      g < b.group_ranks.size() ? static_cast<int>(b.group_ranks[g]) : 1,
                      g < b.group_recompute.size() ? static_cast<int>(b.group_recompute[g]) : -1});
  return groups;
}

bool ranks_share_packs(const Config& config) {
  if (config.batching.method == Batching::balanced) {
    const Integers& named = config.batching.select_ranks;
    if (config.mesh.sp > 1)
      return std::any_of(named.begin(), named.end(), [](std::int64_t n) { return n > 1; });
    return !joined_ranks(batching_options(config)).empty();
  }
  if (config.batching.method != Batching::hbp || takes_stored_groups(config)) return false;
  const std::vector<PackGroup> groups = pack_groups(config);
  return std::any_of(groups.begin(), groups.end(), [](const PackGroup& g) { return g.ranks > 1; });
}

void set_groups(BatchingConfig& b, const std::vector<PackGroup>& groups) {
  b.groups.clear(), b.group_ranks.clear(), b.group_recompute.clear();
  for (const PackGroup& g : groups)
    b.groups.push_back(g.tokens), b.group_ranks.push_back(g.ranks),
        b.group_recompute.push_back(g.recompute_layers);
  b.groups_from = GroupSource::deck;
}

void set_groups(Config& config, const std::vector<PackGroup>& groups, const std::string& place,
                Origin origin) {
  set_groups(config.batching, groups);
  for (const char* key : {"batching.groups", "batching.group_ranks", "batching.group_recompute",
                          "batching.groups_from"})
    config.from.settings[key] = {origin, place};
}

Curriculum curriculum(const Config& config) {
  Curriculum found{config.curriculum.steps, config.curriculum.max_tokens,
                   config.batching.global_tokens, config.batching.global_samples};
  if (found.max_tokens == 0 && config.batching.method == Batching::hbp &&
      !config.batching.groups.empty())
    found.max_tokens = config.batching.groups.front();
  return found;
}

double pair_cost_tokens(const ModelShape& shape) {
  if (shape.layers < 1) return 0;
  const double per_pair =
      4.0 * static_cast<double>(shape.head_dim * shape.query_heads * shape.layers);
  const double per_token = 2.0 * static_cast<double>(shape.parameters_without_embedding() +
                                                     shape.vocabulary * shape.hidden);
  return per_pair / per_token;
}

LearningRate learning_rate(const Config& config) {
  const OptimizerConfig& o = config.optimizer;
  LearningRate rate{o.schedule, o.learning_rate, o.minimum_learning_rate, o.warmup_steps};
  rate.decay_steps = o.decay_steps > 0 ? o.decay_steps : config.run.steps;
  rate.wsd_decay_steps = o.wsd_decay_steps > 0 ? o.wsd_decay_steps : (rate.decay_steps + 9) / 10;
  return rate;
}

AttentionOptions attention_options(const Config& config) {
  const AttentionConfig& a = config.attention;
  AttentionOptions options;
  options.pattern = a.pattern;
  options.index = a.index;
  options.vertical_share = a.vertical_share;
  options.slash_share = a.slash_share;
  options.last_q = a.last_q;
  options.selection = a.selection;
  options.stretch = a.stretch;
  options.coverage_rows = config.dst.coverage_rows;
  options.max_columns = a.max_columns;
  options.max_slashes = a.max_slashes;
  options.moba_block = a.moba_block;
  options.moba_top_k = a.moba_top_k;
  options.xattention_block = a.xattention_block;
  options.xattention_stride = a.xattention_stride;
  options.xattention_threshold = a.xattention_threshold;
  options.flex_threshold = a.flex_threshold;
  options.flex_share = a.flex_share;
  options.indexes_every = config.trace.enabled ? config.trace.indexes_every : 0;
  options.recall_every = config.trace.enabled ? config.trace.recall_every : 0;
  options.recall_rows = config.trace.recall_rows;
  options.recall_seed = config.run.seed;
  options.generator.density = a.generated_density;
  options.generator.band_tokens = a.generated_band_tokens;
  options.generator.columns = a.generated_columns;
  options.generator.seed = config.run.seed;
  options.generator.heads = static_cast<int>(std::max<std::int64_t>(1, config.model.query_heads));
  return options;
}

namespace {

/// Whether groups of several ranks run with the rest of the deck (refused_combinations).
bool groups_run(const Config& config) { return config.mesh.sp == 1 && !config.dst.enabled; }

/// Groups that balanced may form: divisors of mesh.dp, or those of them that batching.select_ranks
/// names; if it names none, single ranks where others do not run.
std::vector<PlacementSplit> placement_splits(const Config& config) {
  const Integers& named = config.batching.select_ranks;
  const MeshShape& mesh = config.mesh;
  // Products of a mesh that is refused may not be numbers of ranks.
  if (!problems(mesh, 0).empty()) return {{1, 1, 1}};
  std::vector<PlacementSplit> splits{{1, mesh.sp, mesh.cp()}};
  if (named.empty() ? !groups_run(config) : mesh.sp > 1) return splits;
  for (int ranks = 2; ranks <= mesh.dp; ++ranks)
    if (mesh.dp % ranks == 0 &&
        (named.empty() || std::find(named.begin(), named.end(), ranks) != named.end())) {
      const ContextSplit split = joined_split(mesh, ranks, config.model.query_heads);
      splits.push_back({ranks, split.sp, split.ring()});
    }
  return splits;
}

}  // namespace

BatchingOptions batching_options(const Config& config) {
  constexpr int kEveryChunk = 1 << 30;  // other schedules forward none twice
  const BatchingConfig& b = config.batching;
  BatchingOptions options;
  options.method = b.method;
  options.micro_batch_tokens =
      b.method == Batching::chunkflow ? config.chunk.tokens : b.micro_batch_tokens;
  options.dp = config.mesh.dp;
  options.pair_cost_tokens = pair_cost_tokens(model_shape(config));
  options.groups = pack_groups(config);
  options.packing = b.packing;
  options.balance = b.balance;
  options.seed = config.run.seed;
  options.micro_batch_samples = b.micro_batch_samples;
  const AttentionOptions attention = attention_options(config);
  options.align = attention.align();
  options.chunk_align = attention.causal() ? attention.stretch : 1;
  options.splits = placement_splits(config);
  options.stages = config.mesh.pp;
  const PipelineOptions pipeline = pipeline_options(config);
  options.chunk_k = state_aware(pipeline.schedule) ? pipeline.k : kEveryChunk;
  return options;
}

WindowOptions window_options(const Config& config) {
  WindowOptions window;
  window.steps = config.batching.window;
  window.rule = config.batching.window_rule;
  window.global_tokens = config.batching.global_tokens;
  window.global_samples = config.batching.global_samples;
  if (const double pairs = pair_cost_tokens(model_shape(config)); pairs > 0)
    window.token_pairs = pairs_of_token(1, pairs);
  return window;
}

PipelineOptions pipeline_options(const Config& config) {
  const CostsConfig& stated = config.costs;
  const ModelShape model = model_shape(config);
  PipelineOptions options;
  options.schedule = config.pipeline.schedule;
  if (options.schedule == ScheduleKind::automatic) {
    // Whatever cuts samples bounds the chunks that live.
    const Batching method = config.batching.method;
    const bool chunks = method == Batching::chunkflow || method == Batching::balanced;
    options.schedule = chunks ? ScheduleKind::state_aware_1f1b : ScheduleKind::one_f_one_b;
  }
  options.stages = config.mesh.pp;
  options.k = static_cast<int>(config.chunk.k);
  options.search = config.pipeline.search;
  options.offload = config.chunk.offload == Offload::host;
  PipelineCosts& costs = options.costs;
  costs.token_s = stated.forward_token_s;
  costs.pair_s =
      states_times(config) ? stated.forward_pair_s : costs.token_s * pair_cost_tokens(model);
  costs.micro_batch_s = stated.forward_micro_batch_s;
  costs.backward_over_forward = stated.backward_over_forward;
  costs.weight_share = weight_share(model);
  costs.hop_token_s = stated.stage_hop_token_s;
  return options;
}

std::vector<std::int64_t> layer_begin(const Config& config) {
  const ModelShape model = model_shape(config);
  const int stages = config.mesh.pp;
  if (stages <= 1 || model.layers < stages) return {0};
  // A full pack's tokens see half of it on average.
  const double context = static_cast<double>(batching_options(config).micro_batch_tokens) / 2;
  return balance_stages(model.layers, stages, part_costs(model, context));
}

bool has_budgets(PatternKind pattern) {
  return pattern == PatternKind::moba || pattern == PatternKind::vertical_slash;
}

bool has_slashes(PatternKind pattern) {
  return pattern == PatternKind::vertical_slash || pattern == PatternKind::by_head ||
         pattern == PatternKind::flexprefill;
}

PatternKind budget_pattern(const Config& config) {
  const AttentionConfig& attention = config.attention;
  return attention.index == IndexOrigin::pattern && has_budgets(attention.pattern)
             ? attention.pattern
             : PatternKind::dense;
}

std::int64_t budget_block_tokens(const Config& config) {
  return budget_pattern(config) == PatternKind::moba ? config.attention.moba_block : kBlock;
}

bool takes_stored_groups(const Config& config) {
  return config.batching.method == Batching::hbp &&
         config.batching.groups_from == GroupSource::profile;
}

bool lacks_groups(const Config& config) {
  return config.batching.method == Batching::hbp && !takes_stored_groups(config) &&
         config.batching.groups.empty();
}

std::vector<int> joined_ranks(const BatchingOptions& batching) {
  std::set<int> degrees;
  for (const PackGroup& group : batching.groups)
    if (batching.method == Batching::hbp && group.ranks > 1) degrees.insert(group.ranks);
  for (const PlacementSplit& split : batching.splits)
    if (batching.method == Batching::balanced && split.ranks > 1) degrees.insert(split.ranks);
  return {degrees.begin(), degrees.end()};
}

namespace {

LayoutChoice layout_choice(const Config& config, const RunOptions& options) {
  LayoutChoice choice;
  const std::int64_t align = options.attention.align();
  choice.rule = {config.ring.layout, config.ring.stripe, align};
  if (config.ring.layout == LayoutKind::automatic)
    choice.rule.stripe = (choice.rule.stripe + align - 1) / align * align;
  // Striping alone spreads a slash over the ranks (MTraining Section 3.3).
  choice.striped =
      has_slashes(config.attention.pattern) || options.attention.index != IndexOrigin::pattern;
  if (const double pair = pair_cost_tokens(options.model); pair > 0) choice.token_pairs = 1 / pair;
  return choice;
}

}  // namespace

SequenceLayout RunOptions::sequence_layout(std::int64_t tokens) const {
  const MicroBatch sample{{{0, 0, tokens, 0}}};
  const LayoutRule rule = layout.of(sample, mesh.cp());
  return SequenceLayout(rule.kind, tokens, mesh.cp(), rule.stripe, rule.align);
}

RunOptions RunOptions::from(const Config& config) {
  RunOptions options;
  options.mesh = config.mesh;
  options.model = model_shape(config);
  options.normaliser = trains_pairs(config) ? LossNormaliser::pair_mean : config.loss.normaliser;
  options.curriculum = ballast::curriculum(config);
  options.window = window_options(config);
  options.batching = batching_options(config);
  options.attention = attention_options(config);
  options.layout = layout_choice(config, options);
  options.pipeline = pipeline_options(config);
  options.layer_begin = ballast::layer_begin(config);
  return options;
}

}  // namespace ballast
