// `ballast bench step DECK`: time of whole training steps, without log, trace and checkpoints.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>

#include "app/measure/bench.hpp"
#include "app/measure/step_profile.hpp"
#include "app/observe/overheads.hpp"
#include "app/observe/peak_rate.hpp"
#include "app/train/budget_tuning.hpp"
#include "app/train/pair_reference.hpp"
#include "app/train/step_planner.hpp"
#include "app/train/train_step.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kObserved = 3;  // steps with events, for the shares of tuning and planning

/// GiB of the rank, and of the device, that needs most: what Ballast held at its peak, and what is
/// in use now by all processes (0: not known).  Collective.
std::pair<double, double> peak_memory(Session& session) {
  const auto most = [&](std::int64_t bytes) {
    return session.mesh.world.all_reduce(static_cast<double>(bytes), Reduction::max) / (1 << 30);
  };
  const double held = most(memory_use().peak_total);
  return {held, most(session.device.used_bytes())};
}

/// How the table's columns are to be read.
std::string notes(const Session& session, double peak) {
  return fmt::format(
      "# TFLOP/s: 6 FLOPs a weight of every matrix product and token (4 where it is frozen), 12 D "
      "a visible pair and query head; recomputation does not count.  mfu: of {:.3g} TFLOP/s "
      "dense{}\n"
      "# memory_gib: what Ballast holds at most; device_gib: in use on the fullest device at the "
      "end, by all its processes (0: not known)\n",
      peak * 1e-12,
      session.options.attention.sparse()
          ? "; pairs that sparse attention leaves out count too, so it can pass 1"
          : "");
}

/// The upper one of an even number.
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// What the timed steps gave, and the steps after them.
struct Measured {
  std::vector<double> times;  ///< of each timed step, on the slowest rank
  std::int64_t put_off = 0;   ///< trials of products' algorithms that waited in timed steps
  double tokens = 0, flops = 0, loss = 0;
  bool alike = true;                     ///< all timed steps have as many tokens and FLOPs
  std::map<std::string, double> shares;  ///< of tuning and planning, Overheads::shares
  BudgetFacts budgets;                   ///< of all ranks in the timed steps
  std::optional<StepProfile> profile;
  std::vector<std::string> notes;  ///< of the profile table

  double mean_tokens() const { return tokens / static_cast<double>(times.size()); }
  /// That the tokens took: of steps that are alike the median each, which one disturbed step does
  /// not move.
  double seconds() const {
    return alike ? median(times) * static_cast<double>(times.size())
                 : std::accumulate(times.begin(), times.end(), 0.0);
  }
};

/// Adds a step's budgets of all ranks to `all`.  Collective.
void add_budgets(const Communicator& world, const BudgetFacts& mine, BudgetFacts& all) {
  double sums[] = {mine.choices, mine.choices * mine.mean_budget,
                   mine.choices * mine.mean_coverage_loss};
  Tensor summed = Tensor::wrap(sums, {3}, DType::f64);
  world.all_reduce(summed, Reduction::sum);
  all.largest_coverage_loss = std::max(
      all.largest_coverage_loss, world.all_reduce(mine.largest_coverage_loss, Reduction::max));
  if (sums[0] == 0) return;
  all.choices += sums[0];
  all.mean_budget += (sums[1] - sums[0] * all.mean_budget) / all.choices;
  all.mean_coverage_loss += (sums[2] - sums[0] * all.mean_coverage_loss) / all.choices;
}

/// Adds what a step's events say of tuning and planning, of the slowest ranks.  Collective.
void add_overheads(Session& session, std::int64_t step, double seconds, Overheads& spent) {
  OverheadSeconds mine;
  session.recorder.flush(
      [&](std::span<const Event> events) { mine = overhead_seconds(events, step); });
  const Communicator& world = session.mesh.world;
  spent.add({world.all_reduce(mine.tuning_s, Reduction::max),
             world.all_reduce(mine.planning_s, Reduction::max)},
            seconds);
}

/// Runs `warmup` steps, those that are timed, those that are profiled, and those whose events are
/// read.
Measured measure(Session& session, const BenchSettings& settings) {
  const Communicator& world = session.mesh.world;
  const Config& config = session.config;
  session.recorder.enabled = false;
  ShardedOptimizer optimizer(session.parameters, session.mesh.replica, config.optimizer.zero,
                             adamw_options(config), nullptr, muon_options(config));
  optimizer.reset_master_from_values();
  TrainStep step(session, optimizer);
  StepPlanner planner(session, step.costs());
  const std::int64_t warmup = settings.integer("warmup", 0),
                     profiled = settings.integer("profile", 0),
                     timed = warmup + settings.integer("repeats"), traced = timed + profiled;
  Measured m;
  if (profiled > 0)
    together(session.mesh.world,
             [&] { m.profile.emplace(session.device, session.mesh.world, "step", "run.backend"); });
  Overheads spent(config.dst.enabled, balances_by_weight(config.batching.method));
  const std::int64_t steps = traced + (spent.any() ? kObserved : 0);
  SamplerPosition position;
  for (std::int64_t i = 0; i < steps; ++i) {
    if (m.profile && i == timed) m.profile->start();
    session.recorder.enabled = i >= traced;
    session.recorder.context.step = static_cast<std::int32_t>(i);
    session.device.settle();  // updates go on beside the next step, as they do in training
    world.barrier();
    hold_choices(session.backend, i >= warmup);
    const std::int64_t put_off = choices_put_off(session.backend);
    const auto begin = std::chrono::steady_clock::now();
    const PlannedStep planned = [&] {
      Scope scope(&session.recorder, EventKind::planning);
      return planner.next(i, position, steps);
    }();
    position = planned.after;
    const TrainStep::Gradients found = step.compute(planned.plan);
    step.update(found.norm, i + 1);
    session.device.settle();
    const double seconds = world.all_reduce(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
        Reduction::max);
    if (session.recorder.enabled) add_overheads(session, i, seconds, spent);
    if (m.profile && i + 1 == traced) m.profile->stop(profiled);
    if (i < warmup || i >= timed) continue;
    m.times.push_back(seconds);
    m.put_off += world.all_reduce(choices_put_off(session.backend) - put_off, Reduction::max);
    const auto tokens = static_cast<double>(planned.plan.tokens());
    const double flops = session.training_flops(planned.plan);
    m.tokens += tokens;
    m.flops += flops;
    const auto count = static_cast<double>(m.times.size());
    m.alike =
        m.alike && m.tokens == count * tokens && std::abs(m.flops - count * flops) < 1e-9 * m.flops;
    m.loss = found.loss;
    if (session.config.dst.enabled) add_budgets(world, session.tuning->facts(), m.budgets);
  }
  for (const auto& [key, share] : spent.shares()) m.shares[key] = share;
  m.notes = step.table_notes();
  return m;
}

/// The figures of a run in the order in which table and JSON have them.
struct Row {
  Timing timing;
  double tokens_per_s = 0, flops_per_s = 0, mfu = 0, memory_gib = 0, device_gib = 0;
};

std::string table(const Session& session, const Measured& m, const Row& row, double peak) {
  const ModelShape& model = session.options.model;
  std::string text = session.backend.note.empty() ? "" : "# " + session.backend.note + "\n";
  text += fmt::format("step {} on {} x {}, {:.0f} tokens a step, {} parameters in {}\n",
                      model.preset, session.mesh.world.size(), session.device.description(),
                      m.mean_tokens(), model.parameters(),
                      session.config.run.fp8() ? "fp8" : name(session.parameters.dtype()));
  text += fmt::format("  {:>10} {:>10} {:>10} {:>14} {:>13} {:>7} {:>10} {:>10} {:>8}\n",
                      "median_s", "min_s", "max_s", "tokens/s/rank", "TFLOP/s/rank", "mfu",
                      "memory_gib", "device_gib", "loss");
  text += fmt::format(
      "  {:>10.4f} {:>10.4f} {:>10.4f} {:>14.1f} {:>13.3f} {:>7.4f} {:>10.2f} {:>10.2f} {:>8.4f}\n",
      row.timing.median_s, row.timing.min_s, row.timing.max_s, row.tokens_per_s,
      row.flops_per_s * 1e-12, row.mfu, row.memory_gib, row.device_gib, m.loss);
  text += notes(session, peak);
  if (m.put_off > 0)
    text += fmt::format(
        "# {} choices of a matrix product's algorithm, which take up to seconds, were put off in "
        "the timed steps; a larger warmup=M makes them before\n",
        m.put_off);
  if (m.profile) text += m.profile->text();
  for (const std::string& note : m.notes) text += "# profile: " + note + "\n";
  for (const auto& [key, share] : m.shares) text += fmt::format("  {} {:.6f}\n", key, share);
  if (m.budgets.choices > 0)
    text += fmt::format(
        "  budgets of the timed steps, all ranks: {:.2f} blocks on average, coverage given up "
        "{:.6f} on average, {:.6f} at most\n",
        m.budgets.mean_budget, m.budgets.mean_coverage_loss, m.budgets.largest_coverage_loss);
  return text;
}

nlohmann::ordered_json figures(const Session& session, const Measured& m, const Row& row) {
  nlohmann::ordered_json json{{"benchmark", "step"},
                              {"ranks", session.mesh.world.size()},
                              {"device", session.device.description()},
                              {"tokens_per_step", m.mean_tokens()}};
  json.update(to_json(row.timing));
  json["steps_s"] = m.times;  // cases of one deck have the same samples in the same steps
  json["choices_put_off"] = m.put_off;
  json["tokens_per_s_per_rank"] = row.tokens_per_s;
  json["tflops_per_rank"] = row.flops_per_s * 1e-12;
  json["mfu"] = row.mfu;
  json["peak_memory_gib"] = row.memory_gib;
  json["device_memory_gib"] = row.device_gib;
  json["loss"] = m.loss;
  if (m.profile) json["profile"] = m.profile->json();
  for (const auto& [key, share] : m.shares) json[key] = share;
  if (m.budgets.choices > 0) {
    json["budget"] = m.budgets.mean_budget;
    json["coverage_loss"] = m.budgets.mean_coverage_loss;
    json["largest_coverage_loss"] = m.budgets.largest_coverage_loss;
  }
  return json;
}

BenchResult run_step(const Config& config, const BenchSettings& settings) {
  const Communicator world = Communicator::world();
  if (config.run.backend == Backend::cuda) {  // before a host takes a model meant for a GPU
    const std::string missing = missing_gpu(world);
    check_all(world, missing.empty(),
              fmt::format("bench step: run.backend = \"cuda\": {}; run.backend=host measures the "
                          "host",
                          missing));
  }
  reset_peak_memory();  // cases of a deck run one after another
  Session session(world, config);
  if (!config.model.weights.empty()) session.parameters.initialise(config.run.seed);  // not read
  load_pairs(session);
  choose_products_early(session.backend);
  const double peak = dense_peak_flops(session.device, session.parameters.dtype());
  const Measured m = measure(session, settings);
  const auto [least, most] = std::minmax_element(m.times.begin(), m.times.end());
  Row row{.timing = {median(m.times), *least, *most}};
  const double rank_seconds = m.seconds() * world.size();
  row.tokens_per_s = m.tokens / rank_seconds;
  row.flops_per_s = m.flops / rank_seconds;
  row.mfu = row.flops_per_s / peak;
  std::tie(row.memory_gib, row.device_gib) = peak_memory(session);
  return {table(session, m, row, peak), figures(session, m, row)};
}

}  // namespace

Benchmark step_benchmark() {
  return {"step",
          "whole training steps of a deck, without log, trace and checkpoints",
          {{"warmup", "6", "steps before timing"},
           {"repeats", "7", "timed steps"},
           {"profile", "0", "steps after those whose GPU kernels are recorded by CUPTI, by group"}},
          nullptr,
          run_step};
}

}  // namespace ballast
