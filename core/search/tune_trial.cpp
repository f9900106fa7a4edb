#include "core/search/tune_trial.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "core/config/deck_rules.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/plan_step.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/predict/sparsity_tuning.hpp"
#include "core/predict/step_memory.hpp"

namespace ballast {
namespace {

constexpr int kAllLanes = 8;  // whose memory is replayed one by one

/// A deck as the planner and the clock take it.
struct PlannedDeck {
  PlannedDeck(const Config& config, const Costs& costs, std::shared_ptr<const HeadTable> heads)
      : options(RunOptions::from(config)), simulation(simulation_options(config, options)) {
    options.attention.heads = std::move(heads);
    memory = stage_memories(config, options);
    options.batching.sample_cost = [this, &costs](std::int64_t tokens) {
      return sample_seconds(costs, tokens, static_cast<double>(simulation.base_budget),
                            own_split(options.mesh), simulation.recompute.of(0));
    };
    step = step_options(config, options, simulation, costs);
  }
  PlannedDeck(const PlannedDeck&) = delete;
  PlannedDeck& operator=(const PlannedDeck&) = delete;

  RunOptions options;
  SimulationOptions simulation;
  StepOptions step;
  std::vector<StageMemory> memory;
};

/// Data-parallel ranks that may hold most: all where there are few, else those with the largest
/// micro-batch, the most in flight, the most in all and the longest sample in chunks.
std::set<int> heavy_lanes(const StepPlan& plan) {
  std::set<int> lanes;
  const auto count = static_cast<int>(plan.lanes.size());
  if (count <= kAllLanes) {
    for (int d = 0; d < count; ++d) lanes.insert(d);
    return lanes;
  }
  std::array<std::pair<double, int>, 4> most{};
  for (int d = 0; d < count; ++d) {
    std::vector<double> tokens;
    std::map<std::int64_t, double> samples;
    for (const int id : plan.lanes[static_cast<std::size_t>(d)].micro_batches) {
      const PlannedMicroBatch& m = plan.micro_batches[static_cast<std::size_t>(id)];
      tokens.push_back(0);
      for (const Segment& s : m.segments)
        tokens.back() += static_cast<double>(s.tokens()) / m.split.ranks();
      if (m.chunk > 0) samples[m.segments.front().sample] += tokens.back();
    }
    std::sort(tokens.rbegin(), tokens.rend());
    std::array<double, 4> of{};
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      of[0] = tokens.front(), of[2] += tokens[i];
      if (static_cast<int>(i) < plan.mesh.pp) of[1] += tokens[i];
    }
    for (const auto& [sample, sum] : samples) of[3] = std::max(of[3], sum);
    for (std::size_t i = 0; i < of.size(); ++i) most[i] = std::max(most[i], {of[i], d});
  }
  for (const auto& [tokens, d] : most) lanes.insert(d);
  return lanes;
}

/// Stages that may hold most: the first, the last two and, since later stages have fewer
/// micro-batches in flight, the first with each number of layers.
std::set<std::size_t> heavy_stages(const std::vector<StageMemory>& stages) {
  std::set<std::size_t> list;
  std::set<std::int64_t> layers;
  for (std::size_t s = 0; s < stages.size(); ++s)
    if (s == 0 || s + 2 >= stages.size() || layers.insert(stages[s].layers).second) list.insert(s);
  return list;
}

std::int64_t peak_bytes(const StepPlan& plan, const std::set<int>& lanes,
                        const std::vector<StageMemory>& stages) {
  const std::set<std::size_t> heavy = heavy_stages(stages);
  std::int64_t bytes = 0;
  std::vector<std::vector<StageWork>> seen;  // lanes alike
  for (const int d : lanes) {
    std::vector<StageWork> work = lane_work(plan, d, stages.front().index_rules());
    if (std::find(seen.begin(), seen.end(), work) != seen.end()) continue;
    for (const std::size_t s : heavy)
      bytes = std::max(bytes, replay_memory(stages[s], work.at(s)).total());
    seen.push_back(std::move(work));
  }
  return bytes;
}

/// Peak bytes of the fullest rank, were the data's longest sample in this step: of the ranks that
/// hold it, all of its groups, and of those that are full with what it leaves to them.
std::int64_t longest_bytes(const PlannedDeck& deck, std::vector<SampleLength> samples,
                           const SampleLength& longest) {
  const auto most = std::max_element(
      samples.begin(), samples.end(),
      [](const SampleLength& a, const SampleLength& b) { return a.tokens < b.tokens; });
  if (most == samples.end() || most->tokens >= longest.tokens) return 0;
  most->tokens = longest.tokens, most->chosen_tokens = longest.chosen_tokens;
  const StepPlan plan = plan_step(0, samples, deck.step);
  std::set<int> lanes = heavy_lanes(plan);
  for (const PlannedMicroBatch& m : plan.micro_batches)
    if (std::any_of(m.segments.begin(), m.segments.end(),
                    [&](const Segment& s) { return s.sample == most->sample; }))
      for (int r = 0; r < m.group.ranks; ++r) lanes.insert(m.group.first + r);
  return peak_bytes(plan, lanes, deck.memory);
}

/// Sum over a step's tokens of the coverage, by the mean curve of dst.simulated_coverage, of the
/// budgets that tuning gives their layers; tokens.
std::pair<double, double> tuned_coverage(const StepPlan& plan, const SimulationOptions& options) {
  const std::vector<std::int64_t>& budgets = options.dst.candidates;
  std::pair<double, double> sum{0, 0};
  for (const PlannedMicroBatch& m : plan.micro_batches) {
    const auto all = static_cast<double>(m.micro_batch().tokens());
    std::vector<double> curve(budgets.size(), 0);
    for (const Segment& s : m.segments)
      for (const std::int64_t blocks : options.coverage_blocks)
        for (std::size_t k = 0; k < curve.size(); ++k)
          curve[k] += static_cast<double>(s.tokens()) / all *
                      simulated_coverage(s.end, budgets[k], blocks, options.block_tokens) /
                      static_cast<double>(options.coverage_blocks.size());
    for (std::size_t stage = 0; stage < plan.layer_begin.size(); ++stage) {
      const bool last = stage + 1 == plan.layer_begin.size();
      LayerBudgets layers(options.dst, m.tuning);
      for (std::int64_t l = plan.layer_begin[stage];
           l < (last ? options.layers : plan.layer_begin[stage + 1]); ++l) {
        const auto at = std::find(budgets.begin(), budgets.end(), layers.next(curve));
        sum.first += all * curve.at(static_cast<std::size_t>(at - budgets.begin()));
        sum.second += all;
      }
    }
  }
  return sum;
}

void add_step(Trial& trial, const StepPlan& plan, const SimulatedStep& step) {
  if (trial.steps == 0) trial.first_step_s = step.step_s, trial.terms = step.terms;
  const auto mean = [n = static_cast<double>(trial.steps)](double& all, double value) {
    all = (n * all + value) / (n + 1);
  };
  mean(trial.step_s, step.step_s);
  mean(trial.load_balance, step.load_balance);
  mean(trial.idle_ranks, step.idle_ranks);
  mean(trial.tokens, static_cast<double>(plan.tokens()));
  trial.pipelines.add(step.pipelines);
  ++trial.steps;
}

}  // namespace

const Costs& TuneTrials::costs(const Candidate& candidate) {
  std::shared_ptr<const Costs>& made = costs_[candidate.mesh.pp];
  if (!made) made = input_.costs(with(input_.base, candidate));
  return *made;
}

Trial TuneTrials::run(const Candidate& candidate) {
  Trial trial;
  trial.candidate = candidate;
  const auto wrong = problems(with(input_.base, candidate));
  if (wrong.empty()) return more(trial, 1);
  trial.words = wrong.front().message();
  return trial;
}

Trial TuneTrials::more(Trial trial, std::int64_t steps) {
  const Config config = with(input_.base, trial.candidate);
  const double limit = input_.limits.memory_bytes;
  try {
    const PlannedDeck deck(config, costs(trial.candidate), input_.heads);
    const auto all = std::min(steps, static_cast<std::int64_t>(input_.steps.size()));
    while (trial.steps < all) {
      const auto& samples = input_.steps[static_cast<std::size_t>(trial.steps)];
      const StepPlan plan = plan_step(trial.steps, samples, deck.step);
      ++planned_;
      if (trial.steps == 0) trial.bytes = longest_bytes(deck, samples, input_.longest);
      trial.bytes = std::max(trial.bytes, peak_bytes(plan, heavy_lanes(plan), deck.memory));
      trial.state = limit > 0 && static_cast<double>(trial.bytes) > limit ? TrialState::over_memory
                                                                          : TrialState::fits;
      if (trial.state == TrialState::over_memory) break;  // its time does not matter
      if (input_.limits.coverage > 0 && deck.simulation.tune)
        hold_coverage(trial, plan, deck.simulation);
      add_step(trial, plan, simulate(plan, deck.simulation, costs(trial.candidate)));
    }
  } catch (const Error& e) {
    trial.state = TrialState::refused;
    trial.words = e.what();
  }
  return trial;
}

void TuneTrials::hold_coverage(Trial& trial, const StepPlan& plan,
                               const SimulationOptions& simulation) const {
  const auto [sum, tokens] = tuned_coverage(plan, simulation);
  trial.covered += sum, trial.covered_of += tokens;
  trial.uncovered = trial.covered < input_.limits.coverage * trial.covered_of;
  require(
      !trial.uncovered,
      "tuning lowers dst.base_budget = {} to budgets that cover {:.4f} of attention on average, "
      "less than --coverage {}; lower dst.threshold or take a larger base budget",
      simulation.base_budget, trial.covered / trial.covered_of, input_.limits.coverage);
}

std::int64_t TuneTrials::bytes_in_turn(const Trial& trial) {
  const PlannedDeck deck(with(input_.base, trial.candidate), costs(trial.candidate), input_.heads);
  std::vector<StepPlan> plans;
  std::set<int> lanes;
  for (std::int64_t step = 0; step < trial.steps; ++step) {
    plans.push_back(plan_step(step, input_.steps[static_cast<std::size_t>(step)], deck.step));
    lanes.merge(heavy_lanes(plans.back()));
  }
  std::vector<StageMemory> stages = deck.memory;
  std::vector<StepPlan> passes;
  const auto pass = [&](const std::vector<SampleLength>& samples) {
    passes.push_back(plan_evaluation(samples, deck.step));
    lanes.merge(heavy_lanes(passes.back()));
  };
  if (!input_.drifting.empty()) {
    pass(input_.drifting);
    count_kept_indexes(passes.back(), stages);
  }
  for (const std::vector<SampleLength>& samples : input_.evaluated) pass(samples);
  if (!passes.empty()) plans.push_back(plans.front());  // so that a step follows the last of them
  std::int64_t bytes = 0;
  for (const int d : lanes) {
    std::vector<std::vector<StageWork>> work(stages.size());  // [stage][step]
    for (const StepPlan& plan : plans) {
      std::vector<StageWork> step = lane_work(plan, d, stages.front().index_rules());
      for (std::size_t s = 0; s < stages.size(); ++s) work[s].push_back(std::move(step.at(s)));
    }
    std::vector<std::vector<ForwardPasses>> between(stages.size());
    for (const StepPlan& plan : passes) {
      std::vector<StageWork> work_of = lane_work(plan, d, stages.front().index_rules());
      for (std::size_t s = 0; s < stages.size(); ++s)
        between[s].push_back({std::move(work_of.at(s)), {}});
    }
    for (const std::size_t s : heavy_stages(stages))
      bytes = std::max(bytes, replay_ranks(stages[s], std::move(work[s]), between[s]).total());
  }
  return bytes;
}

Trial TuneTrials::in_turn(Trial trial) {
  const bool steps_alone = input_.drifting.empty() && input_.evaluated.empty();
  if (trial.state != TrialState::fits || (trial.steps < 2 && steps_alone)) return trial;
  const double limit = input_.limits.memory_bytes;
  try {
    trial.bytes = std::max(trial.bytes, bytes_in_turn(trial));
    if (limit > 0 && static_cast<double>(trial.bytes) > limit)
      trial.state = TrialState::over_memory;
  } catch (const Error& e) {  // of an evaluation: training's steps were planned before
    trial.state = TrialState::refused;
    trial.words = e.what();
  }
  return trial;
}

const TuneTrials::Standing& TuneTrials::standing(const Candidate& c) {
  std::vector<std::int64_t> key{c.mesh.pp,
                                c.mesh.replicas(),
                                c.zero,
                                c.mesh.pp > 1 ? c.capacity : 0,
                                c.method == Batching::chunkflow,
                                static_cast<int>(tied_link(c.mesh))};
  for (int stage = 0; stage < c.mesh.pp; ++stage)
    key.push_back(static_cast<int>(replica_link(c.mesh, stage)));
  const auto [at, fresh] = standing_.try_emplace(std::move(key));
  if (!fresh) return at->second;
  Candidate alike = c;  // the same sums in one lane
  alike.mesh.dp = alike.mesh.cp_outer = alike.mesh.sp = 1;
  alike.mesh.cp_inner = c.mesh.replicas();
  alike.zero = std::min(c.zero, 1);  // sums of rounds are a matter of their number
  const Config config = with(input_.base, alike);
  PlannedDeck deck(config, costs(alike), input_.heads);
  deck.step.tuning = nullptr;
  Batch none;
  none.micro_batches.resize(1);
  StepPlan plan = plan_batch_step(none, deck.step);
  plan.mesh = c.mesh;  // its sums go where its ranks lie
  at->second.end_s = simulate(plan, deck.simulation, costs(alike)).step_s;
  for (StageMemory& stage : deck.memory) {
    stage.zero = c.zero;
    at->second.bytes = std::max(at->second.bytes, replay_memory(stage, {}).total());
  }
  return at->second;
}

std::int64_t TuneTrials::standing_bytes(const Candidate& c) { return standing(c).bytes; }
double TuneTrials::end_s(const Candidate& c) { return standing(c).end_s; }

std::vector<Candidate> TuneTrials::memory_choices(const Candidate& candidate) {
  std::vector<int> zeros = zero_choices(input_.base);
  const auto at = [&](int zero) {
    Candidate c = candidate;
    c.zero = zero;
    return c;
  };
  std::stable_sort(zeros.begin(), zeros.end(),
                   [&](int a, int b) { return end_s(at(a)) < end_s(at(b)); });
  std::vector<Candidate> list;
  for (const RecomputeOptions& recompute : recompute_choices(input_.base))
    for (const Offload offload : offload_choices(input_.base, candidate.method))
      for (const int zero : zeros) {
        list.push_back(at(zero));
        list.back().recompute = recompute, list.back().offload = offload;
      }
  return list;
}

Trial TuneTrials::fewer_layers(const Trial& all, const Trial& none) {
  const Config config = with(input_.base, all.candidate);
  std::int64_t layers = 0;
  for (const StageMemory& stage : stage_memories(config, RunOptions::from(config)))
    layers = std::max(layers, stage.layers);
  const double share = (static_cast<double>(none.bytes) - input_.limits.memory_bytes) /
                       std::max(1.0, static_cast<double>(none.bytes - all.bytes));
  auto count = static_cast<int>(std::ceil(share * static_cast<double>(layers)));
  for (int tries = 0; tries < 2 && count < layers; ++tries) {
    Candidate some = all.candidate;
    some.recompute.layers = std::max(1, count);
    if (Trial trial = run(some); trial.state == TrialState::fits)
      return trial.step_s < all.step_s ? trial : all;
    count += static_cast<int>(1 + layers / 16);
  }
  return all;
}

Trial TuneTrials::lightest(const Candidate& candidate) {
  const std::int64_t before = planned_;
  Trial trial = lightest_of(memory_choices(candidate));
  trial.planned = planned_ - before;
  return trial;
}

Trial TuneTrials::better_as_it_is(Trial lightest, const Candidate& plan) {
  const std::int64_t before = planned_;
  Trial trial = run(plan);
  trial.planned = lightest.planned + planned_ - before;
  const bool fits = lightest.state == TrialState::fits;
  if (trial.state == TrialState::fits && (!fits || trial.step_s < lightest.step_s)) return trial;
  lightest.planned = trial.planned;
  return lightest;
}

Trial TuneTrials::longer(const Trial& trial, std::int64_t steps, bool in_turn) {
  const auto run_on = [&](const Trial& from) {
    if (from.state != TrialState::fits) return from;
    Trial to = more(from, steps);
    return in_turn ? this->in_turn(std::move(to)) : to;
  };
  const Trial found = run_on(trial);
  if (found.state != TrialState::over_memory) return found;
  const double limit = input_.limits.memory_bytes;
  const Candidate& tried = found.candidate;
  bool behind = false;  // of the choices, those behind the one that was tried
  for (const Candidate& choice : memory_choices(tried)) {
    const bool same = choice.recompute.mode == tried.recompute.mode &&
                      choice.offload == tried.offload && choice.zero == tried.zero;
    const bool all_layers = same && choice.recompute.layers != tried.recompute.layers;
    if (behind || all_layers)
      if (static_cast<double>(standing_bytes(choice)) <= limit)
        if (Trial next = run_on(run(choice)); next.state == TrialState::fits) return next;
    behind = behind || same;
  }
  return found;
}

Trial TuneTrials::lightest_of(const std::vector<Candidate>& choices) {
  const double limit = input_.limits.memory_bytes;
  std::optional<Trial> whole, smallest, refused;  // without recompute; of all that are over
  const auto over = [&](const Trial& t) { return static_cast<double>(t.bytes) - limit; };
  for (const Candidate& choice : choices) {
    const bool hopeless = limit > 0 && static_cast<double>(standing_bytes(choice)) > limit;
    // What a rank holds whatever it computes shifts its peak by as much.
    if (smallest && !hopeless && smallest->candidate.recompute.mode == choice.recompute.mode &&
        smallest->candidate.offload == choice.offload &&
        over(*smallest) >
            static_cast<double>(standing_bytes(smallest->candidate) - standing_bytes(choice)))
      continue;
    Trial trial;
    if (hopeless) {
      trial.candidate = choice;
      trial.state = TrialState::over_memory, trial.bytes = standing_bytes(choice);
    } else {
      trial = run(choice);
    }
    if (trial.state == TrialState::refused) {
      if (!refused) refused = std::move(trial);
      continue;
    }
    if (trial.state == TrialState::fits) {
      if (choice.recompute.mode == Recompute::none || choice.recompute.layers >= 0 || !whole)
        return trial;
      return fewer_layers(trial, *whole);
    }
    if (choice.recompute.mode == Recompute::none && !hopeless) whole = trial;
    if (!smallest || trial.bytes < smallest->bytes) smallest = trial;
  }
  return smallest ? *smallest : *refused;
}

}  // namespace ballast
