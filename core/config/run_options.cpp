#include "core/config/run_options.hpp"

#include <algorithm>
#include <set>

#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/context/ulysses_heads.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/predict/placement_costs.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/predict/stated_costs.hpp"

namespace ballast {

MeshShape mesh_shape(const Deck& deck) {
  const auto degree = [&](const char* path) { return static_cast<int>(deck.integer(path)); };
  MeshShape shape;
  shape.dp = degree("mesh.dp");
  shape.pp = degree("mesh.pp");
  shape.cp_outer = degree("mesh.cp_outer");
  shape.cp_inner = degree("mesh.cp_inner");
  shape.sp = degree("mesh.sp");
  shape.tp = degree("mesh.tp");
  shape.ranks_per_node = degree("mesh.ranks_per_node");
  return shape;
}

ModelShape model_shape(const Deck& given) {
  Deck deck = given;
  deck.apply_preset();
  ModelShape shape;
  shape.preset = deck.text("model.preset");
  if (shape.preset == "custom" && !deck.text("model.weights").empty())
    shape.preset = deck.text("model.weights");
  shape.layers = deck.integer("model.layers");
  shape.hidden = deck.integer("model.hidden");
  shape.intermediate = deck.integer("model.intermediate");
  shape.query_heads = deck.integer("model.query_heads");
  shape.kv_heads = deck.integer("model.kv_heads");
  shape.head_dim = deck.integer("model.head_dim");
  shape.vocabulary = deck.integer("model.vocabulary");
  shape.qkv_bias = deck.boolean("model.qkv_bias");
  shape.tied_embedding = deck.boolean("model.tied_embedding");
  shape.rms_eps = deck.real("model.rms_eps");
  shape.initial_std = deck.real("model.initial_std");
  shape.rope_theta = deck.real("model.rope_theta");
  shape.yarn_factor = deck.real("model.yarn_factor");
  shape.original_context = deck.integer("model.original_context");
  shape.llama3_factor = deck.real("model.llama3_factor");
  shape.llama3_low = deck.real("model.llama3_low");
  shape.llama3_high = deck.real("model.llama3_high");
  shape.lora = lora_options(deck);
  return shape;
}

LoraOptions lora_options(const Deck& deck) {
  LoraOptions options;
  options.rank = deck.integer("lora.rank");
  options.alpha = deck.real("lora.alpha");
  options.dropout = deck.real("lora.dropout");
  options.projections = deck.config().lora.projections;
  options.seed = static_cast<std::uint64_t>(deck.integer("run.seed"));
  return options;
}

NeedleOptions needle_options(const Deck& deck) {
  NeedleOptions options;
  options.lengths = deck.get<std::vector<std::int64_t>>("data.needle_lengths");
  options.length_share = deck.get<std::vector<double>>("data.needle_length_share");
  options.held_out_share = deck.get<std::vector<double>>("data.needle_held_out_share");
  const auto list = [&](const char* key, std::vector<std::int64_t>& value) {
    const auto& given = deck.get<std::vector<std::int64_t>>(key);
    if (!given.empty()) value = given;
  };
  list("data.needle_pairs", options.pairs);
  list("data.needle_questions", options.questions);
  options.keys = deck.integer("data.needle_keys");
  options.values = deck.integer("data.needle_values");
  options.closing = deck.boolean("data.needle_closing");
  options.value_tokens = deck.integer("data.needle_value_tokens");
  options.vocabulary = model_shape(deck).vocabulary;
  options.seed = static_cast<std::uint64_t>(deck.integer("run.seed"));
  return options;
}

double pair_cost_tokens(const ModelShape& shape) {
  if (shape.layers < 1) return 0;
  const double per_pair =
      4.0 * static_cast<double>(shape.head_dim * shape.query_heads * shape.layers);
  const double per_token = 2.0 * static_cast<double>(shape.parameters_without_embedding() +
                                                     shape.vocabulary * shape.hidden);
  return per_pair / per_token;
}

std::vector<std::string> not_executable(const Deck& deck) {
  std::vector<std::string> list = not_executable(mesh_shape(deck));
  if (deck.text("batching.scope") == "epoch")
    list.push_back(
        "batching.scope = \"epoch\" is for `ballast pack`: a training step's samples do not depend "
        "on the mesh; set batching.scope = "
        "\"step\"");
  return list;
}

namespace {
AttentionOptions attention_options(const Deck& deck) {
  AttentionOptions options;
  options.pattern = deck.config().attention.pattern;
  options.generated = deck.text("attention.index") == "generated";
  options.vertical_share = deck.real("attention.vertical_share");
  options.slash_share = deck.real("attention.slash_share");
  options.last_q = deck.integer("attention.last_q");
  options.max_columns = deck.integer("attention.max_columns");
  options.max_slashes = deck.integer("attention.max_slashes");
  options.moba_block = deck.integer("attention.moba_block");
  options.moba_top_k = deck.integer("attention.moba_top_k");
  options.xattention_block = deck.integer("attention.xattention_block");
  options.xattention_stride = deck.integer("attention.xattention_stride");
  options.xattention_threshold = deck.real("attention.xattention_threshold");
  options.generator.density = deck.real("attention.generated_density");
  options.generator.band_tokens = deck.integer("attention.generated_band_tokens");
  options.generator.columns = deck.integer("attention.generated_columns");
  options.generator.seed = static_cast<std::uint64_t>(deck.integer("run.seed"));
  return options;
}
}  // namespace

std::vector<int> RunOptions::joined_ranks() const {
  std::set<int> degrees;
  for (const PackGroup& group : batching.groups)
    if (batching.method == "hbp" && group.ranks > 1) degrees.insert(group.ranks);
  for (const PlacementSplit& split : batching.splits)
    if (batching.method == "balanced" && split.ranks > 1) degrees.insert(split.ranks);
  return {degrees.begin(), degrees.end()};
}

namespace {

/// Groups that balanced may form: divisors of mesh.dp that divide the query heads, or those of them
/// that batching.select_ranks names.
std::vector<PlacementSplit> placement_splits(const Deck& deck, const RunOptions& options) {
  const auto& named = deck.get<std::vector<std::int64_t>>("batching.select_ranks");
  const MeshShape& mesh = options.mesh;
  std::vector<PlacementSplit> splits{{1, mesh.sp, mesh.cp()}};
  for (int ranks = 2; ranks <= mesh.dp && mesh.sp == 1; ++ranks)
    if (mesh.dp % ranks == 0 && head_split_problem(options.model.query_heads, ranks).empty() &&
        (named.empty() || std::find(named.begin(), named.end(), ranks) != named.end()))
      splits.push_back({ranks, ranks, mesh.cp()});
  return splits;
}

/// What balanced places by: stated costs, else built-in rates of the backend's device.
std::shared_ptr<const PlacementCosts> placement_costs(const Deck& deck, const RunOptions& options) {
  std::shared_ptr<const Costs> costs;
  if (deck.block_set("costs") || options.model.layers == 0) {
    const PipelineCosts& stated = options.pipeline.costs;
    StatedTimes times;
    times.token_s = stated.token_s;
    times.pair_s = stated.pair_s;
    times.micro_batch_s = stated.micro_batch_s;
    times.backward_over_forward = stated.backward_over_forward;
    times.exchange_token_s = deck.real("costs.exchange_token_s");
    costs = std::make_shared<StatedCosts>(times);
  } else {
    const Config& config = deck.config();
    WorkShape work;
    work.model = options.model;
    work.element_bytes = static_cast<std::int64_t>(size_of(config.run.type()));
    work.ranks_per_node = options.mesh.ranks_per_node;
    costs = std::make_shared<RateCosts>(
        device_rates(config.run.backend == Backend::cuda ? DeviceKind::h200
                                                         : DeviceKind::host_core),
        work);
  }
  PlacedWork work;
  work.layers = std::max<std::int64_t>(options.model.layers, options.mesh.pp);
  work.mesh = options.mesh;
  work.recompute = deck.config().recompute;
  // A fixed budget; others follow the scores of a run, and count every visible key here.
  if (options.attention.pattern == PatternKind::moba) {
    constexpr std::int64_t kCostBlock = 64;
    work.budget = options.attention.moba_top_k * options.attention.moba_block / kCostBlock;
  }
  return std::make_shared<StepPlacementCosts>(std::move(costs), work);
}

void set_placement(const Deck& deck, RunOptions& options) {
  options.batching.splits = placement_splits(deck, options);
  options.batching.stages = options.mesh.pp;
  options.batching.chunk_k = options.pipeline.k;
  options.batching.placement_costs = placement_costs(deck, options);
}

WindowOptions window_options(const Deck& deck, double pair_cost_tokens) {
  WindowOptions window;
  window.steps = deck.integer("batching.window");
  window.global_tokens = deck.integer("batching.global_tokens");
  window.global_samples = deck.integer("batching.global_samples");
  if (pair_cost_tokens > 0) window.token_pairs = pairs_of_token(1, pair_cost_tokens);
  return window;
}

}  // namespace

RunOptions RunOptions::from(const Deck& deck) {
  RunOptions options;
  options.mesh = mesh_shape(deck);
  options.model = model_shape(deck);
  options.batching.method = deck.text("batching.method");
  options.batching.micro_batch_tokens = deck.integer(
      options.batching.method == "chunkflow" ? "chunk.tokens" : "batching.micro_batch_tokens");
  options.batching.dp = options.mesh.dp;
  options.batching.pair_cost_tokens = pair_cost_tokens(options.model);
  options.batching.balance = deck.boolean("batching.balance");
  options.batching.micro_batch_samples =
      static_cast<int>(deck.integer("batching.micro_batch_samples"));
  options.batching.seed = static_cast<std::uint64_t>(deck.integer("run.seed"));
  const auto& ranks = deck.get<std::vector<std::int64_t>>("batching.group_ranks");
  const auto& recompute = deck.get<std::vector<std::int64_t>>("batching.group_recompute");
  for (const std::int64_t tokens : deck.get<std::vector<std::int64_t>>("batching.groups")) {
    const std::size_t g = options.batching.groups.size();
    options.batching.groups.push_back({tokens, g < ranks.size() ? static_cast<int>(ranks[g]) : 1,
                                       g < recompute.size() ? static_cast<int>(recompute[g]) : -1});
  }
  options.normaliser = deck.config().loss.normaliser;
  options.curriculum = {deck.integer("curriculum.steps"), deck.integer("curriculum.max_tokens"),
                        deck.integer("batching.global_tokens"),
                        deck.integer("batching.global_samples")};
  if (options.curriculum.max_tokens == 0 && options.batching.method == "hbp" &&
      !options.batching.groups.empty())
    options.curriculum.max_tokens = options.batching.groups.front().tokens;
  options.window = window_options(deck, options.batching.pair_cost_tokens);
  options.layout = deck.config().ring.layout;
  options.stripe = deck.integer("ring.stripe");
  options.attention = attention_options(deck);
  options.attention.generator.heads =
      static_cast<int>(std::max<std::int64_t>(1, options.model.query_heads));
  options.batching.align = options.attention.align();
  options.pipeline.schedule = deck.text("pipeline.schedule");
  options.pipeline.stages = options.mesh.pp;
  options.pipeline.k = static_cast<int>(deck.integer("chunk.k"));
  options.pipeline.search = static_cast<int>(deck.integer("pipeline.search"));
  options.pipeline.offload = deck.text("chunk.offload") == "host";
  PipelineCosts& costs = options.pipeline.costs;
  costs.token_s = deck.real("costs.forward_token_s");
  costs.pair_s = deck.is_set("costs.forward_pair_s") || deck.is_set("costs.forward_token_s")
                     ? deck.real("costs.forward_pair_s")  // stated costs are whole
                     : costs.token_s * options.batching.pair_cost_tokens;
  costs.micro_batch_s = deck.real("costs.forward_micro_batch_s");
  costs.backward_over_forward = deck.real("costs.backward_over_forward");
  costs.weight_share = weight_share(options.model);
  costs.hop_token_s = deck.real("costs.stage_hop_token_s");
  if (options.mesh.pp > 1 && options.model.layers >= options.mesh.pp) {
    // A full pack's tokens see half of it on average.
    const double context = static_cast<double>(options.batching.micro_batch_tokens) / 2;
    options.layer_begin =
        balance_stages(options.model.layers, options.mesh.pp, part_costs(options.model, context));
  }
  if (options.batching.method == "balanced") set_placement(deck, options);
  return options;
}

}  // namespace ballast
