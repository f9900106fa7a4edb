// `ballast bench step DECK`: time of whole training steps, without log, trace and checkpoints.
#include <algorithm>
#include <chrono>

#include "app/measure/bench.hpp"
#include "app/measure/peak_rate.hpp"
#include "app/observe/overheads.hpp"
#include "app/train/step_planner.hpp"
#include "app/train/train_step.hpp"
#include "app/train/trainer.hpp"

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
      "# TFLOP/s: 6 FLOPs a weight of every matrix product and token, 12 D a visible pair and "
      "query head; recomputation does not count.  mfu: of {:.3g} TFLOP/s dense{}\n"
      "# memory_gib: what Ballast holds at most; device_gib: in use on the fullest device at the "
      "end, by all its processes (0: not known)\n",
      peak * 1e-12,
      session.options.attention.sparse()
          ? "; pairs that sparse attention leaves out count too, so it can pass 1"
          : "");
}

BenchResult run(const Config& config, const BenchSettings& settings) {
  const Communicator world = Communicator::world();
  Session session(world, config);
  session.recorder.enabled = false;
  ShardedOptimizer optimizer(session.parameters, session.mesh.replica, config.optimizer.zero,
                             adamw_options(config), nullptr, muon_options(config));
  optimizer.reset_master_from_values();
  TrainStep step(session, optimizer);
  StepPlanner planner(session, step.costs());
  const double peak = dense_peak_flops(session.device, session.parameters.dtype());
  const std::int64_t warmup = settings.integer("warmup", 0), repeats = settings.integer("repeats");
  SamplerPosition position;
  std::vector<double> times;
  double tokens = 0, flops = 0, loss = 0;
  Overheads spent(config.dst.enabled, balances_by_weight(config.batching.method));
  const std::int64_t observed = spent.any() ? kObserved : 0;  // steps after the timed ones
  for (std::int64_t i = 0; i < warmup + repeats + observed; ++i) {
    session.recorder.enabled = i >= warmup + repeats;
    session.recorder.context.step = static_cast<std::int32_t>(i);
    session.device.synchronize();
    world.barrier();
    const auto begin = std::chrono::steady_clock::now();
    const PlannedStep planned = [&] {
      Scope scope(&session.recorder, EventKind::planning);
      return planner.next(i, position, warmup + repeats + observed);
    }();
    position = planned.after;
    const StepPlan& plan = planned.plan;
    const TrainStep::Gradients found = step.compute(plan);
    step.update(found.norm, i + 1);
    session.device.synchronize();
    const double seconds = world.all_reduce(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
        Reduction::max);
    if (session.recorder.enabled) {
      OverheadSeconds mine;
      session.recorder.flush(
          [&](std::span<const Event> events) { mine = overhead_seconds(events, i); });
      spent.add({world.all_reduce(mine.tuning_s, Reduction::max),
                 world.all_reduce(mine.planning_s, Reduction::max)},
                seconds);
    }
    if (i < warmup || i >= warmup + repeats) continue;
    times.push_back(seconds);
    tokens += static_cast<double>(plan.tokens());
    flops += session.training_flops(plan);
    loss = found.loss;
  }
  const std::vector<double> in_order = times;
  std::sort(times.begin(), times.end());
  const Timing timing{times[times.size() / 2], times.front(), times.back()};
  const double ranks = world.size(), steps = static_cast<double>(repeats);
  const double tokens_per_s = tokens / steps / timing.median_s / ranks,
               rate = flops / steps / timing.median_s / ranks;
  const auto [memory_gib, device_gib] = peak_memory(session);
  const ModelShape& model = session.options.model;
  std::string text =
      fmt::format("step {} on {} x {}, {:.0f} tokens a step, {} parameters in {}\n", model.preset,
                  world.size(), session.device.description(), tokens / steps, model.parameters(),
                  name(session.parameters.dtype()));
  text += fmt::format("  {:>10} {:>10} {:>10} {:>14} {:>13} {:>7} {:>10} {:>10} {:>8}\n",
                      "median_s", "min_s", "max_s", "tokens/s/rank", "TFLOP/s/rank", "mfu",
                      "memory_gib", "device_gib", "loss");
  text += fmt::format(
      "  {:>10.4f} {:>10.4f} {:>10.4f} {:>14.1f} {:>13.3f} {:>7.4f} {:>10.2f} {:>10.2f} {:>8.4f}\n",
      timing.median_s, timing.min_s, timing.max_s, tokens_per_s, rate * 1e-12, rate / peak,
      memory_gib, device_gib, loss);
  text += notes(session, peak);
  for (const std::string& note : step.table_notes()) text += "# profile: " + note + "\n";
  nlohmann::ordered_json json{{"benchmark", "step"},
                              {"ranks", world.size()},
                              {"device", session.device.description()},
                              {"tokens_per_step", tokens / steps}};
  json.update(to_json(timing));
  json["steps_s"] = in_order;  // cases of one deck have the same samples in the same steps
  json["tokens_per_s_per_rank"] = tokens_per_s;
  json["tflops_per_rank"] = rate * 1e-12;
  json["mfu"] = rate / peak;
  json["peak_memory_gib"] = memory_gib;
  json["device_memory_gib"] = device_gib;
  json["loss"] = loss;
  for (const auto& [key, share] : spent.shares()) {
    text += fmt::format("  {} {:.6f}\n", key, share);
    json[key] = share;
  }
  return {std::move(text), std::move(json)};
}

}  // namespace

Benchmark step_benchmark() {
  return {"step",
          "whole training steps of a deck, without log, trace and checkpoints",
          {{"warmup", "2", "steps before timing"}, {"repeats", "7", "timed steps"}},
          nullptr,
          run};
}

}  // namespace ballast
