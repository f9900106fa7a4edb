// ballast plan: a run with sparsity-aware batching and dynamic sparsity tuning, simulated step by
// step (SparseBalance Section V, Table I).
#include <algorithm>
#include <chrono>

#include "app/command/plan.hpp"
#include "app/plan/latency.hpp"
#include "app/plan/planned_samples.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/sparse_balance.hpp"

namespace ballast {
namespace {

constexpr std::size_t kListedSteps = 50;  // of the twin's list of latencies

SparseBalanceOptions simulation_options(const Deck& deck, const RunOptions& run) {
  SparseBalanceOptions o;
  o.stages = run.mesh.pp;
  o.layers = std::max<std::int64_t>(run.model.layers, run.mesh.pp);
  o.tune = deck.boolean("dst.enabled");
  o.dst = dst_options(deck);
  if (const auto& blocks = deck.get<std::vector<std::int64_t>>("dst.simulated_coverage");
      !blocks.empty())
    o.coverage_blocks = blocks;
  o.seed = static_cast<std::uint64_t>(deck.integer("run.seed"));
  return o;
}

/// Means over the steps of one configuration.
struct Means {
  double imbalance = 0, step_time_s = 0, planning_s = 0, bubble = 0, budget = 0, loss = 0,
         largest_loss = 0;
  std::vector<double> forward_max_s, forward_mean_s, forward_min_s;
  double steps = 0;
  void add(const SimulatedStep& s, double planned_s) {
    ++steps;
    const auto mean = [&](double& of, double value) { of += (value - of) / steps; };
    mean(imbalance, s.imbalance), mean(step_time_s, s.step_time_s), mean(planning_s, planned_s),
        mean(bubble, s.bubble_ratio), mean(budget, s.mean_budget), mean(loss, s.mean_coverage_loss);
    largest_loss = std::max(largest_loss, s.largest_coverage_loss);
    if (forward_max_s.size() >= kListedSteps) return;
    forward_max_s.push_back(s.forward_max_s), forward_mean_s.push_back(s.forward_mean_s),
        forward_min_s.push_back(s.forward_min_s);
  }
};

class Simulation {
 public:
  Simulation(const Deck& deck, const RunOptions& run)
      : deck_(deck),
        run_(run),
        options_(simulation_options(deck, run)),
        model_(latency_model(deck, notes)),
        averages_(static_cast<double>(options_.dst.base_budget), deck.real("sab.decay")) {
    run_.batching.sample_cost = [this](std::int64_t tokens) {
      return model_.predict({{{0, 0, tokens, 0}}}, std::llround(averages_.budget(tokens)))
          .total_s();
    };
  }

  /// The whole run under `batching`, with or without tuning; averages of budgets begin anew.
  Means run(const BatchingOptions& batching, bool tune) {
    averages_ =
        BudgetAverages(static_cast<double>(options_.dst.base_budget), deck_.real("sab.decay"));
    PlannedSamples planned(deck_);
    planned.begin_with_curriculum();
    SamplerPosition position;
    SparseBalanceOptions options = options_;
    options.tune = tune;
    Means means;
    for (std::int64_t step = 0; step < deck_.integer("run.steps"); ++step) {
      const std::vector<SampleLength> samples = planned.next(position);
      const auto begin = std::chrono::steady_clock::now();
      const Batch batch = plan_batch(step, samples, batching);
      const double planned_s =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const SimulatedStep one = simulate_step(batch, model_, options);
      averages_.update(one.budget_sums, one.budget_counts);
      means.add(one, planned_s);
    }
    return means;
  }
  const BatchingOptions& batching() const { return run_.batching; }
  const SparseBalanceOptions& options() const { return options_; }

  std::vector<std::string> notes;

 private:
  const Deck& deck_;
  RunOptions run_;
  SparseBalanceOptions options_;
  LatencyModel model_;
  BudgetAverages averages_;
};

}  // namespace

std::optional<PlanPart> plan_sparsebalance(const Deck& deck) {
  const RunOptions run = RunOptions::from(deck);
  const std::string& method = run.batching.method;
  if (!deck.block_set("dst") && method != "sab" && method != "lbb") return std::nullopt;
  require(deck.integer("run.steps") > 0, "{}: run.steps = 0: name the global batches to simulate",
          deck.file);
  Simulation simulation(deck, run);
  const bool tune = simulation.options().tune;
  const Means found = simulation.run(simulation.batching(), tune);
  BatchingOptions in_order = simulation.batching();
  in_order.method = "none";
  const Means baseline = method == "none" && !tune ? found : simulation.run(in_order, false);
  const double speedup = baseline.step_time_s / found.step_time_s;

  PlanPart part;
  part.title = fmt::format("sparsity and balance over {} global batches, dp {}, pp {}", found.steps,
                           run.mesh.dp, run.mesh.pp);
  // The first four columns are the paper's, in its order.
  part.header = {"imbalance", "iter_ms",      "planning_ms", "speedup",       "batching",
                 "dst",       "bubble_ratio", "mean_budget", "coverage_loss", "largest_loss"};
  part.note =
      "means over global batches.  imbalance: max / mean over micro-batches of the time averaged "
      "over their stages (Equation 11); iter_ms: "
      "1F1B of the\nslowest data-parallel rank; planning_ms: assigning a batch, on this host "
      "(tuning's own cost is measured in runs: "
      "dst_overhead_share); speedup: over\nthe same samples in given order without tuning; "
      "coverage_loss: drop of coverage against the base "
      "budget, mean over layers and micro-batches\n(negative: gained), largest_loss its largest";
  for (const std::string& note : simulation.notes) part.note += "\nnote: " + note;
  const DstOptions& dst = simulation.options().dst;
  part.rows.push_back(
      {fmt::format("{:.2f}x", found.imbalance), fmt::format("{:.2f}", 1e3 * found.step_time_s),
       fmt::format("{:.2f}", 1e3 * found.planning_s), fmt::format("{:.2f}x", speedup), method,
       tune ? fmt::format("{} {}", deck.text("dst.anchor"), dst.threshold) : "-",
       fmt::format("{:.4f}", found.bubble), fmt::format("{:.1f}", found.budget),
       fmt::format("{:.4f}", found.loss), fmt::format("{:.4f}", found.largest_loss)});
  part.values = {{"batching", method},
                 {"dst", tune},
                 {"imbalance", found.imbalance},
                 {"step_time", found.step_time_s},
                 {"planning_s", found.planning_s},
                 {"speedup", speedup},
                 {"bubble_ratio", found.bubble},
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
