#include "app/plan/planned_run.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "app/plan/latency.hpp"
#include "core/plan/pipeline/stage_balance.hpp"
#include "core/predict/path_targets.hpp"
#include "core/predict/placement_costs.hpp"
#include "core/predict/stated_costs.hpp"
#include "core/predict/step_costs.hpp"
#include "core/predict/table_costs.hpp"

namespace ballast {
namespace {

WorkShape work_shape(const Config& config) {
  WorkShape work;
  work.model = model_shape(config);
  work.element_bytes = static_cast<std::int64_t>(size_of(config.run.type()));
  work.block_tokens = budget_block_tokens(config);
  work.ranks_per_node = config.mesh.ranks_per_node;
  return work;
}

StatedTimes stated_times(const Config& config) {
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
  times.given = config.is_set(&Config::costs);
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

std::shared_ptr<const Costs> plan_costs(const Config& config, std::vector<std::string>& notes) {
  if (const std::string& table = config.profile.table; !table.empty()) {
    const ProfileTable profile = load_profile(config, notes);
    require(budget_pattern(config) == PatternKind::dense ||
                profile.block_tokens == budget_block_tokens(config),
            "{}: budgets of profile table {} count blocks of {} tokens, the deck's of {}; measure "
            "a table for the deck's with `ballast profile`",
            config.from.file, table, profile.block_tokens, budget_block_tokens(config));
    return std::make_shared<TableCosts>(table, profile, config.attention.pattern,
                                        work_shape(config));
  }
  if (config.is_set(&Config::costs) || config.model.layers == 0)
    return std::make_shared<StatedCosts>(stated_times(config));
  const DeviceKind kind =
      config.run.backend == Backend::cuda ? DeviceKind::h200 : DeviceKind::host_core;
  return std::make_shared<RateCosts>(device_rates(kind), work_shape(config));
}

bool has_costs(const Config& config) {
  return !config.profile.table.empty() ||
         config.is_set(&Config::costs, &CostsConfig::forward_token_s);
}

SimulationOptions simulation_options(const Config& config, const RunOptions& options) {
  SimulationOptions simulation;
  simulation.layers = std::max<std::int64_t>(options.model.layers, options.mesh.pp);
  simulation.recompute = config.recompute;
  simulation.tune = config.dst.enabled;
  simulation.dst = dst_options(config);
  // Without tuning the pattern's own budget counts, where it has a fixed one.
  if (budget_pattern(config) == PatternKind::moba || config.is_set(&Config::dst))
    simulation.base_budget = simulation.dst.base_budget;
  simulation.block_tokens = budget_block_tokens(config);
  if (const auto& blocks = config.dst.simulated_coverage; !blocks.empty())
    simulation.coverage_blocks = blocks;
  simulation.seed = config.run.seed;
  simulation.keep_ops = false;
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
  step.layout = {options.layout, options.stripe, options.attention.align()};
  step.batching = options.batching;
  step.pipeline = options.pipeline;
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

PlannedRun::PlannedRun(const Config& config, std::shared_ptr<const Costs> costs)
    : config_(config),
      costs_(std::move(costs)),
      options_(RunOptions::from(config)),
      simulation_(simulation_options(config, options_)),
      averages_(static_cast<double>(simulation_.dst.base_budget), config.sab.decay) {
  options_.batching.placement_costs = placement_costs(options_, simulation_, *costs_);
  begin(options_.batching, simulation_.tune);
}

void PlannedRun::begin(const BatchingOptions& batching, bool tune) {
  simulation_.tune = tune;
  batching_ = batching;
  batching_.sample_cost = [this](std::int64_t tokens) {
    const ContextSplit split{options_.mesh.sp, options_.mesh.cp_outer, options_.mesh.cp_inner};
    return layer_time(*costs_, {{{0, 0, tokens, 0}}}, std::llround(averages_.budget(tokens)), split)
        .total_s();
  };
  averages_ = BudgetAverages(static_cast<double>(simulation_.dst.base_budget), config_.sab.decay);
  samples_ = std::make_unique<PlannedSamples>(config_);
  samples_->begin_with_curriculum();
  position_ = {};
  step_ = 0;
}

PlannedRun::Step PlannedRun::next() {
  const std::vector<SampleLength> samples = samples_->next(position_);
  Step step;
  const auto begin = std::chrono::steady_clock::now();
  Batch batch = plan_batch(step_++, samples, batching_);
  if (weighs_by_chunk(options_.normaliser)) count_loss_tokens(batch, samples_->dataset());
  step.planned_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  step.plan = plan_batch_step(batch, step_options(config_, options_, simulation_, *costs_));
  step.simulated = simulate(step.plan, simulation_, *costs_);
  averages_.update(step.simulated.budgets.sums, step.simulated.budgets.counts);
  return step;
}

void RunFacts::add(const PlannedRun::Step& step) {
  const SimulatedStep& s = step.simulated;
  ++steps;
  step_s += s.step_s, schedule_s += s.schedule_s, useful_s += s.useful_s;
  load_balance += s.load_balance, idle_ranks += s.idle_ranks;
  rank_s += s.schedule_s * static_cast<double>(step.plan.lanes.size() * s.live.size());
  micro_batches += step.plan.micro_batches.size();
  recomputed += s.recomputed;
  live.resize(s.live.size(), 0);
  for (std::size_t stage = 0; stage < live.size(); ++stage)
    live[stage] = std::max(live[stage], s.live[stage]);
}

RunFacts first_steps(const Config& config, std::shared_ptr<const Costs> costs, std::int64_t count) {
  PlannedRun run(config, std::move(costs));
  RunFacts facts;
  for (std::int64_t step = 0; step < count; ++step) facts.add(run.next());
  return facts;
}

}  // namespace ballast
