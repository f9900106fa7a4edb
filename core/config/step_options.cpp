#include "core/config/step_options.hpp"

#include <algorithm>
#include <numeric>

#include "core/base/division.hpp"
#include "core/model/muon_table.hpp"
#include "core/model/parameter_table.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/predict/path_targets.hpp"
#include "core/predict/placement_costs.hpp"
#include "core/predict/stated_costs.hpp"
#include "core/predict/step_costs.hpp"

namespace ballast {
namespace {

StatedTimes stated_times(const Config& config, std::shared_ptr<const PatternWork> pattern) {
  const PipelineCosts costs = pipeline_options(config).costs;
  StatedTimes times;
  times.token_s = costs.token_s;
  times.pair_s = costs.pair_s;
  times.micro_batch_s = costs.micro_batch_s;
  times.backward_over_forward = costs.backward_over_forward;
  times.weight_share = costs.weight_share;
  times.stage_hop_token_s = costs.hop_token_s;
  times.exchange_token_s = config.costs.exchange_token_s;
  times.ring_hop_token_s = config.costs.ring_hop_token_s;
  times.query_heads = config.model.query_heads;
  times.kv_heads = config.model.kv_heads;
  times.block_tokens = budget_block_tokens(config);
  times.pattern = std::move(pattern);
  times.given = states_times(config);
  return times;
}

/// First layers of the stages; a deck without a model has one layer a stage.
std::vector<std::int64_t> stage_begins(const RunOptions& options) {
  if (static_cast<int>(options.layer_begin.size()) == options.mesh.pp) return options.layer_begin;
  std::vector<std::int64_t> begin(static_cast<std::size_t>(options.mesh.pp));
  std::iota(begin.begin(), begin.end(), 0);
  return begin;
}

}  // namespace

DstOptions dst_options(const Config& config) {
  const DstConfig& dst = config.dst;
  DstOptions options{dst.anchor, dst.threshold, 0, dst.budgets, dst.bound, dst.dead_band};
  if (dst.enabled) options.base_budget = dst.base_budget;
  if (options.base_budget == 0 && budget_pattern(config) == PatternKind::moba)
    options.base_budget = config.attention.moba_top_k;
  if (options.candidates.empty()) options.candidates = default_candidates(options.base_budget);
  return options;
}

bool chooses_pairs(const Config& config) {
  const AttentionOptions attention = attention_options(config);
  return attention.sparse() && attention.chosen() && attention.pattern != PatternKind::moba &&
         !config.dst.enabled;
}

std::shared_ptr<const PatternWork> pattern_work(const Config& config) {
  constexpr int kTimedHeads = 2;  // made-up heads are alike
  const AttentionConfig& attention = config.attention;
  if (attention.index == IndexOrigin::generated && attention.generated_density < 1) {
    GeneratedPattern pattern = attention_options(config).generator;
    pattern.heads = std::min(pattern.heads, kTimedHeads);
    return std::make_shared<PatternWork>(
        [pattern](std::int64_t tokens) { return generated_heads(pattern, tokens); });
  }
  if (chooses_pairs(config) && attention.expected_sparsity > 0)
    return std::make_shared<PatternWork>(1 - attention.expected_sparsity);
  return nullptr;
}

WorkShape work_shape(const Config& config, std::shared_ptr<const PatternWork> pattern) {
  WorkShape work;
  work.pattern = std::move(pattern);
  work.model = model_shape(config);
  work.fp8 = config.run.fp8();
  work.element_bytes = static_cast<std::int64_t>(size_of(config.run.type()));
  work.moment_bytes = config.optimizer.bf16_moments() ? 2 : 4;
  work.bf16_gradients = config.optimizer.bf16_gradients();
  work.block_tokens = budget_block_tokens(config);
  return work;
}

std::shared_ptr<const Costs> stated_costs(const Config& config,
                                          std::shared_ptr<const PatternWork> pattern) {
  if (states_times(config) || config.model.layers == 0)
    return std::make_shared<StatedCosts>(stated_times(config, std::move(pattern)));
  const DeviceKind kind =
      config.run.backend == Backend::cuda ? DeviceKind::h200 : DeviceKind::host_core;
  return std::make_shared<RateCosts>(device_rates(kind), work_shape(config, std::move(pattern)));
}

void StageMuon::add_to(StageMemory& memory) const {
  memory.muon.resize(shares.size());
  for (std::size_t r = 0; r < shares.size(); ++r) {
    MuonShare& sum = memory.muon[r];
    sum.elements += shares[r].elements;
    sum.workspace_bytes = std::max(sum.workspace_bytes, shares[r].workspace_bytes);
    sum.lent = std::max(sum.lent, shares[r].lent);
  }
}

/// [stage] Trainable parameters of one tensor-parallel rank, in stored order; empty without a
/// model.
static std::vector<std::vector<Parameter>> stage_trainables(const Config& config,
                                                            const RunOptions& options) {
  if (options.model.layers == 0) return {};
  std::vector<Parameter> table =
      parameter_table(tensor_shard(options.model, options.mesh.tp), options.layer_begin);
  if (config.optimizer.kind == OptimizerKind::muon) order_for_muon(table);
  std::vector<std::vector<Parameter>> stages(options.layer_begin.size());
  for (Parameter& p : table)
    if (p.trainable) stages[static_cast<std::size_t>(p.stage)].push_back(std::move(p));
  return stages;
}

std::vector<StageMuon> stage_muon(const Config& config, const RunOptions& options) {
  if (config.optimizer.kind != OptimizerKind::muon) return {};
  const int ranks = config.optimizer.zero > 0 ? options.mesh.replicas() : 1;
  std::vector<StageMuon> found;
  for (const std::vector<Parameter>& trainable : stage_trainables(config, options)) {
    std::int64_t elements = 0;
    for (const Parameter& p : trainable) elements += p.numel();
    const MuonWork work = MuonWork::of(trainable);
    const std::int64_t block = std::max<std::int64_t>(1, (elements + ranks - 1) / ranks);
    const MuonShards shards = muon_shards(work, block, ranks, config.optimizer.newton_schulz_steps);
    found.push_back({muon_shares(work, block, shards, config.run.type()), shards.most_lent(),
                     shards.busiest()});
  }
  return found;
}

SimulationOptions simulation_options(const Config& config, const RunOptions& options) {
  SimulationOptions simulation;
  simulation.layers = std::max<std::int64_t>(options.model.layers, options.mesh.pp);
  simulation.recompute = config.recompute;
  simulation.tune = config.dst.enabled;
  simulation.dst = dst_options(config);
  simulation.base_budget = simulation.dst.base_budget;
  simulation.block_tokens = budget_block_tokens(config);
  if (const auto& blocks = config.dst.simulated_coverage; !blocks.empty())
    simulation.coverage_blocks = blocks;
  simulation.seed = config.run.seed;
  simulation.keep_ops = false;
  for (const std::vector<Parameter>& trainable : stage_trainables(config, options))
    simulation.buckets.push_back(parameter_buckets(trainable, bucket_bytes(config)));
  for (const StageMuon& muon : stage_muon(config, options))
    simulation.muon.push_back({muon.flops, muon.exchanged});
  return simulation;
}

std::shared_ptr<const PlacementCosts> placement_costs(const RunOptions& options,
                                                      const SimulationOptions& simulation,
                                                      const Costs& costs) {
  PlacedWork work;
  work.layers = simulation.layers;
  work.mesh = options.mesh;
  work.recompute = simulation.recompute;
  work.budget = simulation.base_budget;
  return std::make_shared<StepPlacementCosts>(costs, work);
}

StepOptions step_options(const Config& config, const RunOptions& options) {
  StepOptions step;
  step.mesh = options.mesh;
  step.zero = config.optimizer.zero;
  step.normaliser = options.normaliser;
  step.layout = options.layout;
  step.batching = options.batching;
  step.pipeline = options.pipeline;
  step.query_heads = options.model.query_heads;
  step.layer_begin = stage_begins(options);
  step.stage_elements.assign(step.layer_begin.size(), 0);
  if (options.model.layers > 0)
    for (const Parameter& p : parameter_table(options.model, step.layer_begin)) {
      if (p.trainable) step.stage_elements.at(static_cast<std::size_t>(p.stage)) += p.numel();
      if (p.trainable && p.tied_copy) step.tied_elements = p.numel();
    }
  return step;
}

StepOptions step_options(const Config& config, const RunOptions& options,
                         const SimulationOptions& simulation, const Costs& costs) {
  StepOptions step = step_options(config, options);
  if (step.batching.method == Batching::balanced)
    step.batching.placement_costs = placement_costs(options, simulation, costs);
  step.costs = [&simulation, &costs](const StepPlan& plan) {
    return schedule_costs(plan, simulation, costs);
  };
  if (simulation.tune)
    step.tuning = [&simulation, &costs](const StepPlan& plan) {
      return tuning_targets(plan, simulation, costs);
    };
  if (simulation.tune && simulation.dst.anchor == Anchor::path)
    step.retuning = [&simulation, &costs](const StepPlan& plan) {
      return path_targets(plan, simulation, costs);
    };
  return step;
}

ModelShape tensor_shard(ModelShape shape, int tp) {
  shape.query_heads = divided_up(shape.query_heads, tp);
  shape.kv_heads = divided_up(shape.kv_heads, tp);
  shape.intermediate = divided_up(shape.intermediate, tp);
  shape.vocabulary = divided_up(shape.vocabulary, tp);
  return shape;
}

std::int64_t bucket_bytes(const Config& config) {
  return config.optimizer.kind == OptimizerKind::muon ? kOneBucket : config.optimizer.bucket_bytes;
}

namespace {

/// StageMemory::dense_keys; tuned budgets rise for short micro-batches, whose attention is dense
/// then.
std::int64_t dense_keys(const Config& config, const AttentionOptions& attention) {
  if (!attention.sparse()) return StageMemory().dense_keys;
  if (!attention.chosen() || attention.pattern != PatternKind::moba) return 0;
  const std::int64_t most =
      config.dst.enabled ? dst_options(config).candidates.back() : attention.moba_top_k;
  return keys_taken(most, attention.moba_block);
}

/// StageMemory::overlap_bytes of a stage whose copy of the embedding lies in this bucket: the
/// fullest rank's slice of it may be of the embedding alone.
std::int64_t tied_overlap_bytes(const StageMemory& stage, const ParameterBucket& bucket) {
  const std::int64_t elements = stage.model.vocabulary * stage.model.hidden,
                     slice = (bucket.elements + stage.replicas - 1) / stage.replicas,
                     held = stage.zero == 0 ? elements : std::min(elements, slice);
  return held * (stage.bf16_gradients && stage.zero < 2 ? 2 : stage.type == DType::f64 ? 8 : 4);
}

}  // namespace

StageMemory common_memory(const Config& config, const RunOptions& options) {
  StageMemory in;
  in.replicas = options.mesh.replicas();
  in.zero = config.optimizer.zero;
  in.bf16_moments = config.optimizer.bf16_moments();
  in.bf16_gradients = config.optimizer.bf16_gradients();
  in.type = config.run.type();
  in.fp8 = config.run.fp8();
  in.head_chunk_tokens = config.model.head_chunk_tokens;
  in.host = config.run.backend == Backend::host;
  return in;
}

std::vector<StageMemory> stage_memories(const Config& config, const RunOptions& options) {
  if (options.model.layers == 0) return {};
  const ModelShape local = tensor_shard(options.model, options.mesh.tp);
  const std::vector<std::int64_t>& begin = options.layer_begin;
  std::vector<StageMemory> stages(begin.size(), common_memory(config, options));
  for (std::size_t s = 0; s < stages.size(); ++s) {
    StageMemory& in = stages[s];
    in.model = local;
    in.layers = (s + 1 < begin.size() ? begin[s + 1] : local.layers) - begin[s];
    in.first_layer = begin[s];
    in.first = s == 0, in.last = s + 1 == begin.size();
    in.recompute = config.recompute;
    in.dense_keys = dense_keys(config, options.attention);
    in.index = {options.attention, config.dst.enabled};
    in.gpu_index = {
        options.attention,
        local.query_heads,
        local.kv_heads,
        local.head_dim,
        config.dst.enabled ? dst_options(config).candidates : std::vector<std::int64_t>{},
        config.run.deterministic};
    in.weighted = weighs_by_segment(options.normaliser) || (trains_pairs(config) && in.last);
    in.offload = options.pipeline.offload;
    in.window_tokens = config.chunk.window_tokens;
  }
  for (const Parameter& p : parameter_table(local, begin)) {
    StageMemory& in = stages[static_cast<std::size_t>(p.stage)];
    (p.trainable ? in.parameters : in.frozen) += p.numel();
  }
  const std::vector<std::vector<Parameter>> trainable = stage_trainables(config, options);
  for (std::size_t s = 0; s < stages.size(); ++s)
    stages[s].buckets = parameter_buckets(trainable[s], bucket_bytes(config));
  if (stages.size() > 1 && local.tied_embedding && !local.lora.enabled()) {
    StageMemory &first = stages.front(), &last = stages.back();
    first.overlap_bytes = tied_overlap_bytes(first, first.buckets.front());
    last.overlap_bytes = tied_overlap_bytes(last, last.buckets.back());
  }
  const std::vector<StageMuon> muon = stage_muon(config, options);
  for (std::size_t s = 0; s < muon.size(); ++s) muon[s].add_to(stages[s]);
  return stages;
}

}  // namespace ballast
