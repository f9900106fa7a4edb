#include "app/plan/planned_run.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "app/plan/drift_sample.hpp"
#include "app/plan/latency.hpp"
#include "app/plan/opened_files.hpp"
#include "core/predict/step_memory.hpp"
#include "core/predict/table_costs.hpp"

namespace ballast {

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
  return stated_costs(config);
}

bool has_costs(const Config& config) {
  return !config.profile.table.empty() ||
         config.is_set(&Config::costs, &CostsConfig::forward_token_s);
}

PlannedRun::PlannedRun(const Config& config, std::shared_ptr<const Costs> costs)
    : config_(config),
      costs_(std::move(costs)),
      options_(RunOptions::from(config)),
      simulation_(simulation_options(config, options_)),
      averages_(static_cast<double>(simulation_.dst.base_budget), config.sab.decay) {
  options_.batching.placement_costs = placement_costs(options_, simulation_, *costs_);
  begin(options_.batching);
}

void PlannedRun::begin_at_base(const BatchingOptions& batching, bool tune) {
  simulation_.tune = tune;
  simulation_.base_budget = simulation_.dst.base_budget;
  begin(batching);
}

void PlannedRun::begin(const BatchingOptions& batching) {
  batching_ = batching;
  batching_.placement_costs = options_.batching.placement_costs;
  batching_.sample_cost = [this](std::int64_t tokens) {
    return sample_seconds(*costs_, tokens, averages_.budget(tokens), own_split(options_.mesh));
  };
  averages_ = BudgetAverages(static_cast<double>(simulation_.dst.base_budget), config_.sab.decay);
  samples_ = std::make_unique<PlannedSamples>(config_);
  samples_->begin_with_curriculum();
  position_ = {};
  step_ = 0;
}

void PlannedRun::count_memory() {
  RunOptions run = options_;
  run.attention.heads = head_table_here(config_);
  simulation_.memory = stage_memories(config_, run);
  StepOptions options = step_options(config_, options_, simulation_, *costs_);
  options.batching = batching_;  // with what samples cost
  const auto add = [&](const std::vector<SampleLength>& samples, AfterSteps when) {
    if (samples.empty()) return;
    simulation_.between.push_back(
        {std::make_shared<const StepPlan>(plan_evaluation(samples, options)), when});
  };
  if (measures_drift(config_, options_.attention)) {
    add(samples_->drifting(), {1, config_.trace.recall_every});
    if (!simulation_.between.empty())
      count_kept_indexes(*simulation_.between.front().plan, simulation_.memory);
  }
  const std::int64_t every = config_.eval.every_steps;
  if (every == 0) return;
  add(samples_->evaluated(), {every, every});
  if (config_.eval.generate.tokens > 0) add(samples_->written(), {every, every});
}

PlannedRun::Step PlannedRun::next() {
  Step step;
  const auto begin = std::chrono::steady_clock::now();
  Batch batch;
  try {
    batch = plan_batch(step_, samples_->next(position_), batching_);
    if (weighs_by_chunk(options_.normaliser)) count_loss_tokens(batch, samples_->dataset());
  } catch (const Error& e) {
    throw UnplannableStep(fmt::format("step {} cannot be planned: {}", step_ + 1, e.what()));
  }
  ++step_;
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
  pipeline_s += s.pipeline_s;
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
