// ballast plan: a run with sparsity-aware batching and dynamic sparsity tuning, simulated step by
// step (SparseBalance Section V, Table I).
#include <algorithm>

#include "app/plan/plan.hpp"
#include "app/plan/planned_run.hpp"

namespace ballast {
namespace {

constexpr std::size_t kListedSteps = 50;  // of the twin's list of latencies

/// Means over the steps of one configuration.
struct Means {
  double imbalance = 0, step_time_s = 0, planning_s = 0, budget = 0, loss = 0, largest_loss = 0;
  PipelineSeconds pipelines;  ///< sums
  std::vector<double> forward_max_s, forward_mean_s, forward_min_s;
  double steps = 0;
  void add(const PlannedRun::Step& step) {
    const SimulatedStep& s = step.simulated;
    ++steps;
    const auto mean = [&](double& of, double value) { of += (value - of) / steps; };
    mean(imbalance, s.imbalance), mean(step_time_s, s.step_s), mean(planning_s, step.planned_s),
        mean(budget, s.budgets.mean_budget), mean(loss, s.budgets.mean_coverage_loss);
    pipelines.add(s.pipelines);
    largest_loss = std::max(largest_loss, s.budgets.largest_coverage_loss);
    if (forward_max_s.size() >= kListedSteps) return;
    forward_max_s.push_back(s.forward_max_s), forward_mean_s.push_back(s.forward_mean_s),
        forward_min_s.push_back(s.forward_min_s);
  }
};

/// The whole run under `batching`, with or without tuning.
Means means_of(PlannedRun& run, const BatchingOptions& batching, bool tune, std::int64_t steps) {
  run.begin(batching, tune);
  Means means;
  for (std::int64_t step = 0; step < steps; ++step) means.add(run.next());
  return means;
}

}  // namespace

std::optional<PlanPart> plan_sparsebalance(const Config& config) {
  const RunOptions options = RunOptions::from(config);
  const Batching method = options.batching.method;
  if (!config.is_set(&Config::dst) && !balances_by_weight(method)) return std::nullopt;
  const std::int64_t steps = config.run.steps;
  require(steps > 0, "{}: run.steps = 0: name the global batches to simulate", config.from.file);
  std::vector<std::string> notes;
  PlannedRun run(config, plan_costs(config, notes));
  const bool tune = run.simulation().tune;
  const Means found = means_of(run, options.batching, tune, steps);
  BatchingOptions in_order = options.batching;
  in_order.method = Batching::none;
  const Means baseline =
      method == Batching::none && !tune ? found : means_of(run, in_order, false, steps);
  const double speedup = baseline.step_time_s / found.step_time_s;

  PlanPart part;
  part.title = fmt::format("sparsity and balance over {} global batches, dp {}, pp {}", found.steps,
                           options.mesh.dp, options.mesh.pp);
  // The first four columns are the paper's, in its order.
  part.header = {"imbalance", "iter_ms",      "planning_ms", "speedup",       "batching",
                 "dst",       "bubble_ratio", "mean_budget", "coverage_loss", "largest_loss"};
  part.note =
      "means over global batches.  imbalance: max / mean over micro-batches of the time averaged "
      "over their stages (Equation 11); iter_ms: "
      "the whole step, by the deck's\nschedule; planning_ms: assigning a batch, on this host "
      "(tuning's own cost is measured in runs: "
      "dst_overhead_share); speedup: over\nthe same samples in given order without tuning; "
      "bubble_ratio: of all batches together; "
      "coverage_loss: drop of coverage against the base "
      "budget, mean over layers and micro-batches\n(negative: gained), largest_loss its largest";
  for (const std::string& note : notes) part.note += "\nnote: " + note;
  const DstOptions& dst = run.simulation().dst;
  part.rows.push_back(
      {fmt::format("{:.2f}x", found.imbalance), fmt::format("{:.2f}", 1e3 * found.step_time_s),
       fmt::format("{:.2f}", 1e3 * found.planning_s), fmt::format("{:.2f}x", speedup), name(method),
       tune ? fmt::format("{} {}", config.dst.anchor, dst.threshold) : "-",
       fmt::format("{:.4f}", found.pipelines.bubble_ratio()), fmt::format("{:.1f}", found.budget),
       fmt::format("{:.4f}", found.loss), fmt::format("{:.4f}", found.largest_loss)});
  part.values = {{"batching", name(method)},
                 {"dst", tune},
                 {"imbalance", found.imbalance},
                 {"step_time", found.step_time_s},
                 {"planning_s", found.planning_s},
                 {"speedup", speedup},
                 {"bubble_ratio", found.pipelines.bubble_ratio()},
                 {"mean_budget", found.budget},
                 {"coverage_loss", found.loss},
                 {"largest_coverage_loss", found.largest_loss},
                 {"global_batches", static_cast<std::int64_t>(found.steps)},
                 {"forward_max_s", found.forward_max_s},
                 {"forward_mean_s", found.forward_mean_s},
                 {"forward_min_s", found.forward_min_s}};
  return part;
}

}  // namespace ballast
