// ballast plan: packing groups from a profile table or stated costs (HBP Algorithm 1), as a table
// and as a deck fragment.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "app/plan/pack_costs.hpp"
#include "app/plan/plan.hpp"
#include "app/plan/planned_run.hpp"
#include "app/plan/planned_samples.hpp"
#include "app/plan/stored_groups.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/packing.hpp"
#include "core/predict/memory_replay.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kSamples = 20000;  // that stand for the data set
constexpr std::size_t kPacks = 64;        // of a length that are timed by Algorithm 3

/// Samples that stand for the data set, as training meets them: the first of the first epoch, in
/// global batches (batching.scope = "step") or all at once; the longest of all is among them.
struct Samples {
  std::vector<std::vector<SampleLength>> batches;
  std::vector<std::int64_t> lengths;

  explicit Samples(const Config& config) {
    PlannedSamples planned(config);
    const std::int64_t most = std::min(kSamples, planned.training_samples());
    const bool epoch = config.batching.scope == BatchScope::epoch;
    SamplerPosition position;
    while (static_cast<std::int64_t>(lengths.size()) < most) {
      batches.push_back(epoch ? planned.first(most) : planned.next(position));
      for (const SampleLength& s : batches.back()) lengths.push_back(s.tokens);
    }
    const Dataset& dataset = planned.dataset();
    const std::int64_t longest = dataset.length(longest_sample(dataset));
    if (std::find(lengths.begin(), lengths.end(), longest) == lengths.end())
      lengths.push_back(longest);
  }
};

/// Naive packs (isf) of the samples that fit into them.
std::vector<MicroBatch> naive_packs(const std::vector<std::int64_t>& lengths, std::int64_t tokens,
                                    std::uint64_t seed) {
  std::vector<std::int64_t> fitting;
  std::copy_if(lengths.begin(), lengths.end(), std::back_inserter(fitting),
               [&](std::int64_t n) { return n <= tokens; });
  const Packing packs = pack_lengths(PackMethod::isf, fitting, tokens, seed);
  std::vector<MicroBatch> list;
  const std::size_t apart = std::max<std::size_t>(1, packs.size() / kPacks);
  for (std::size_t p = 0; p < packs.size() && list.size() < kPacks; p += apart) {
    MicroBatch pack;
    for (const std::uint32_t i : packs[p])
      pack.segments.push_back({static_cast<std::int64_t>(i), 0, fitting[i], 0});
    list.push_back(std::move(pack));
  }
  return list;
}

std::string list_text(const std::vector<PackGroup>& groups,
                      std::int64_t (*value)(const PackGroup&)) {
  std::vector<std::string> items;
  for (const PackGroup& g : groups) items.push_back(fmt::to_string(value(g)));
  return fmt::format("[{}]", fmt::join(items, ", "));
}

GroupSearch search_of(const Config& config, const RunOptions& options) {
  GroupSearch search;
  search.lengths = config.batching.select_lengths;
  search.layers = static_cast<int>(std::max<std::int64_t>(1, options.model.layers));
  search.memory_bytes = config.batching.select_memory_gib * (1 << 30);
  for (const std::int64_t degree : config.batching.select_ranks)
    search.degrees.push_back(static_cast<int>(degree));
  if (search.degrees.empty())
    for (int degree = 1; degree <= options.mesh.dp; degree *= 2)
      if (options.mesh.dp % degree == 0) search.degrees.push_back(degree);
  return search;
}

/// The samples' batches by groups.
class PlannedBatches {
 public:
  PlannedBatches(const Config& config, const RunOptions& options, const Samples& samples,
                 const Costs& costs)
      : samples_(samples),
        costs_(costs),
        epoch_(config.batching.scope == BatchScope::epoch),
        simulation_(simulation_options(config, options)),
        step_(step_options(config, options, simulation_, costs)) {}
  PlannedBatches(const PlannedBatches&) = delete;  // step_ refers to simulation_

  double seconds(const std::vector<PackGroup>& groups) {
    double seconds = 0;
    each_step(groups, [&](const StepPlan& plan) {
      seconds += simulate(plan, simulation_, costs_).step_s;
      return true;
    });
    return seconds;
  }
  std::vector<StepPlan> first_steps(const std::vector<PackGroup>& groups) {
    std::vector<StepPlan> steps;
    std::size_t micro_batches = 0;
    each_step(groups, [&](const StepPlan& plan) {
      micro_batches += plan.micro_batches.size();
      steps.push_back(plan);
      return steps.size() < kCountedSteps && micro_batches < kCountedMicroBatches;
    });
    return steps;
  }

 private:
  /// While `take` returns true.
  void each_step(const std::vector<PackGroup>& groups,
                 const std::function<bool(const StepPlan&)>& take) {
    step_.batching.groups = groups;
    for (std::size_t b = 0; b < samples_.batches.size(); ++b) {
      const std::vector<Batch> batches =
          epoch_ ? plan_epoch(samples_.batches[b], step_.batching)
                 : std::vector{plan_batch(static_cast<std::int64_t>(b), samples_.batches[b],
                                          step_.batching)};
      for (const Batch& batch : batches)
        if (!take(plan_batch_step(batch, step_))) return;
    }
  }

  const Samples& samples_;
  const Costs& costs_;
  bool epoch_;
  SimulationOptions simulation_;
  StepOptions step_;
};

void add_trials(const GroupSelection& selection, PlanPart& part) {
  auto trials = nlohmann::ordered_json::array();
  for (const GroupTrial& t : selection.trials) {
    const bool fits = std::isfinite(t.token_s);
    const bool chosen =
        std::any_of(selection.groups.begin(), selection.groups.end(),
                    [&](const PackGroup& g) { return g.tokens == t.tokens && g.ranks == t.ranks; });
    part.rows.push_back({fmt::to_string(t.tokens), fmt::to_string(t.ranks),
                         fmt::to_string(t.recompute_layers), bytes_text(t.bytes),
                         fits ? fmt::format("{:.4f}", 1e6 * t.token_s) : "does not fit",
                         chosen ? "yes" : ""});
    trials.push_back({{"pack_tokens", t.tokens},
                      {"ranks", t.ranks},
                      {"recompute_layers", t.recompute_layers},
                      {"bytes", t.bytes},
                      {"token_s", fits ? nlohmann::ordered_json(t.token_s) : nullptr}});
  }
  part.values["trials"] = trials;
}

/// Stores the groups where the deck takes them from its profile table, else prints them as a deck.
void hand_over(const Config& config, const std::vector<PackGroup>& groups, int dp, PlanPart& part) {
  const std::string tokens = list_text(groups, [](const PackGroup&g) { return g.tokens; }),
                    ranks =
                        list_text(groups, [](const PackGroup&g) { return std::int64_t{g.ranks}; }),
                    recompute = list_text(
                        groups, [](const PackGroup&g) { return std::int64_t{g.recompute_layers}; });
  const std::vector<Problem> wrong = problems(groups, dp);
  if (takes_stored_groups(config) && wrong.empty()) {
    store_groups(config, groups);
    part.note += fmt::format("; stored in {}: groups {}, ranks {}, recomputed layers {}",
                             config.profile.table, tokens, ranks, recompute);
    part.values["stored_in"] = config.profile.table;
  } else {
    part.note += fmt::format(
        ". For `train` and `pack`:\n\n[batching]\nmethod = \"hbp\"\ngroups = {}\ngroup_ranks = "
        "{}\ngroup_recompute = {}",
        tokens, ranks, recompute);
  }
  for (const Problem& problem : wrong) part.note += "\nnote: " + problem.message();
  for (const char* key : {"groups", "group_ranks", "group_recompute"})
    part.values[key] = nlohmann::ordered_json::array();
  for (const PackGroup& g : groups) {
    part.values["groups"].push_back(g.tokens);
    part.values["group_ranks"].push_back(g.ranks);
    part.values["group_recompute"].push_back(g.recompute_layers);
  }
}

}  // namespace

std::optional<PlanPart> plan_groups(const Config& config) {
  if (config.batching.select_lengths.empty() || config.batching.method != Batching::hbp)
    return std::nullopt;
  const auto begin = std::chrono::steady_clock::now();
  const RunOptions options = RunOptions::from(config);
  std::vector<std::string> notes;
  const std::optional<PackCosts> costs = pack_costs(config, notes);
  require(costs.has_value(),
          "{}: batching.select_lengths needs times: profile.table, or costs.forward_token_s",
          config.from.file);
  const GroupSearch search = search_of(config, options);
  const Samples samples(config);
  const std::int64_t longest = std::ranges::max(samples.lengths);
  require(longest <= search.lengths.back(),
          "{}: batching.select_lengths ends with {}, but a sample has {} tokens; add a longer one "
          "or set data.max_tokens",
          config.from.file, search.lengths.back(), longest);
  const auto packs = [&](std::int64_t tokens) {
    return naive_packs(samples.lengths, tokens, options.batching.seed);
  };
  PlannedBatches batches(config, options, samples, *costs->costs);
  const double first_s = batches.seconds(select_groups(search, packs, *costs).groups);
  const GroupedRun run{[&](const auto& groups) { return batches.seconds(groups); },
                       [&](const auto& groups) { return batches.first_steps(groups); }};
  const GroupSelection selection =
      select_groups_together(search, packs, *costs, run, config.batching.select_refine);
  const double planned_s = batches.seconds(selection.groups);

  PlanPart part;
  part.title = "packing groups, selected";
  part.header = {"pack_tokens", "ranks", "recompute", "memory", "token_us", "chosen"};
  add_trials(selection, part);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  part.note = fmt::format(
      "token_us: rank-microseconds a token in naive packs, forward and backward (HBP Algorithms 1, "
      "3, 4); memory: of a pack of one group alone, steps with packs of all that are chosen take "
      "{}; selected in {:.2f} s: {} samples planned in {:.4g} s with the groups of Algorithm 1, in "
      "{:.4g} s with these",
      bytes_text(selection.bytes), took.count(), samples.lengths.size(), first_s, planned_s);
  part.values["bytes"] = selection.bytes;
  part.values["selection_seconds"] = took.count();
  part.values["algorithm_1_run_s"] = first_s;
  part.values["run_s"] = planned_s;
  hand_over(config, selection.groups, options.mesh.dp, part);
  if (search.memory_bytes > 0 && selection.bytes > search.memory_bytes)
    part.note += fmt::format(
        "\nnote: {} is more than batching.select_memory_gib = {}: full packs of {} tokens keep "
        "within it, the run's own do not; state a lower limit",
        bytes_text(selection.bytes), config.batching.select_memory_gib, search.lengths.back());
  for (const std::string& note : notes) part.note += "\nnote: " + note;
  return part;
}

}  // namespace ballast
