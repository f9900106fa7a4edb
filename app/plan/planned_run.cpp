#include "app/plan/planned_run.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "app/plan/deck_profile.hpp"
#include "app/plan/drift_sample.hpp"
#include "app/plan/opened_files.hpp"
#include "core/predict/step_memory.hpp"
#include "core/predict/table_costs.hpp"
#include "io/trace/recorded_indexes.hpp"

namespace ballast {

namespace {

/// Recorded heads of a sequence, spread over layers and heads; null, with a note, where plans
/// cannot lay them out.
std::shared_ptr<const PatternWork> recorded_work(const std::string& folder,
                                                 std::vector<std::string>& notes) {
  static constexpr std::size_t kTimedHeads = 8;
  if (!std::filesystem::is_directory(folder)) {  // it may lie where the run will be
    notes.push_back(fmt::format("plans time all visible pairs: no folder {} is here", folder));
    return nullptr;
  }
  const auto recorded = std::make_shared<const RecordedIndexes>(read_indexes(folder));
  const auto heads = [recorded](std::int64_t tokens) {
    const std::vector<VerticalSlash> all = recorded_heads(*recorded, tokens);
    const std::size_t count = std::min(kTimedHeads, all.size());
    std::vector<VerticalSlash> some;
    for (std::size_t i = 0; i < count; ++i) some.push_back(all[i * all.size() / count]);
    return some;
  };
  if (recorded->by_stretches()) {
    notes.push_back(
        fmt::format("plans time all visible pairs: the indexes of {} are chosen by stretches "
                    "(attention.selection = \"causal\")",
                    folder));
    return nullptr;
  }
  return std::make_shared<PatternWork>(heads);
}

/// The pattern that the deck's plans time.
std::shared_ptr<const PatternWork> timed_pattern(const Config& config,
                                                 std::vector<std::string>& notes) {
  if (config.attention.index == IndexOrigin::recorded)
    return recorded_work(config.attention.recorded, notes);
  const auto pattern = pattern_work(config);
  if (!pattern && chooses_pairs(config))
    notes.push_back(
        fmt::format("attention.pattern = \"{}\" chooses its pairs while it runs: plans time all "
                    "visible ones unless attention.expected_sparsity (sparsity_ratio of a run's "
                    "report) is stated",
                    name(config.attention.pattern)));
  return pattern;
}

/// Whose rows of attention count: the budgets' where they were measured; else dense ones, of which
/// the pattern computes a share.
PatternKind timed_rows(const Config& config, const ProfileTable& table) {
  const PatternKind pattern = budget_pattern(config);
  const bool measured = std::any_of(table.rows.begin(), table.rows.end(),
                                    [&](const ProfileRow& r) { return r.pattern == pattern; });
  return measured || dst_options(config).base_budget > 0 ? pattern : PatternKind::dense;
}

}  // namespace

std::shared_ptr<const Costs> plan_costs(const Config& config, std::vector<std::string>& notes) {
  const std::string& table = config.profile.table;
  if (table.empty()) return stated_costs(config, timed_pattern(config, notes));
  const ProfileTable profile = load_profile(config, notes);
  const PatternKind rows = timed_rows(config, profile);
  require(rows == PatternKind::dense || profile.block_tokens == budget_block_tokens(config),
          "{}: budgets of profile table {} count blocks of {} tokens, the deck's of {}; measure "
          "a table for the deck's with `ballast profile`",
          config.from.file, table, profile.block_tokens, budget_block_tokens(config));
  return std::make_shared<TableCosts>(table, profile, rows,
                                      work_shape(config, timed_pattern(config, notes)));
}

bool has_costs(const Config& config) {
  return !config.profile.table.empty() || states_times(config);
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
  batching_.placement_costs = options_.batching.placement_costs;
  batching_.sample_cost = [this](std::int64_t tokens) {
    return sample_seconds(*costs_, tokens, averages_.budget(tokens), own_split(options_.mesh),
                          simulation_.recompute.of(0));
  };
  averages_ = BudgetAverages(static_cast<double>(simulation_.dst.base_budget), config_.sab.decay);
  samples_ = std::make_unique<PlannedSamples>(config_);
  samples_->begin_with_curriculum();
  position_ = {};
  step_ = 0;
}

SimulationOptions PlannedRun::memory_options() const {
  SimulationOptions replayed = simulation_;
  RunOptions run = options_;
  run.attention.heads = head_table_here(config_);
  replayed.memory = stage_memories(config_, run);
  StepOptions options = step_options(config_, options_, simulation_, *costs_);
  options.batching = batching_;  // with what samples cost
  const auto add = [&](const std::vector<SampleLength>& samples, AfterSteps when) {
    if (samples.empty()) return;
    replayed.between.push_back(
        {std::make_shared<const StepPlan>(plan_evaluation(samples, options)), when});
  };
  if (measures_drift(config_, options_.attention)) {
    add(samples_->drifting(), {1, config_.trace.recall_every});
    if (!replayed.between.empty())
      count_kept_indexes(*replayed.between.front().plan, replayed.memory);
  }
  const std::int64_t every = config_.eval.every_steps;
  if (every == 0) return replayed;
  add(samples_->evaluated(), {every, every});
  if (config_.eval.generate.tokens > 0) add(samples_->written(), {every, every});
  return replayed;
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
  step_s += s.step_s, schedule_s += s.schedule_s;
  load_balance += s.load_balance, idle_ranks += s.idle_ranks;
  pipelines.add(s.pipelines);
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
