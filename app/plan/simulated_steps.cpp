#include "app/plan/simulated_steps.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "app/plan/planned_run.hpp"
#include "ballast_version.hpp"
#include "core/base/error.hpp"
#include "core/plan/plan_json.hpp"
#include "io/files/text_file.hpp"
#include "io/trace/trace_writer.hpp"
#include "parallel/pipeline/stage_executor.hpp"

namespace ballast {
namespace {

/// Mean over the steps of `value`.
template <class Step, class Value>
double mean(const std::vector<Step>& steps, const Value& value) {
  double sum = 0;
  for (const Step& step : steps) sum += value(step.simulated);
  return steps.empty() ? 0 : sum / static_cast<double>(steps.size());
}

std::int64_t tokens_of(const StepPlan& plan) {
  std::int64_t tokens = 0;
  for (const PlannedMicroBatch& m : plan.micro_batches)
    for (const Segment& s : m.segments) tokens += s.end - s.begin;
  return tokens;
}

TraceHeader header_of(const Config& config, const MeshShape& mesh, int rank,
                      const CheckFacts& facts) {
  const MeshCoordinates at = coordinates(mesh, rank);
  TraceHeader header;
  header.rank = rank;
  header.ranks = mesh.size();
  header.host = facts.node(rank) < 0 ? "simulated" : fmt::format("node {}", facts.node(rank));
  header.device = "simulated";
  header.deck = config.effective_deck();
  header.git_hash = git_hash();
  header.mesh_degrees = {
      {"dp", mesh.dp}, {"pp", mesh.pp}, {"cp_outer", mesh.cp_outer}, {"cp_inner", mesh.cp_inner},
      {"sp", mesh.sp}, {"tp", mesh.tp}};
  header.coordinates = {
      {"dp", at.dp}, {"pp", at.pp}, {"cp_outer", at.cp_outer}, {"cp_inner", at.cp_inner},
      {"sp", at.sp}, {"tp", at.tp}};
  return header;
}

}  // namespace

SimulatedSteps::SimulatedSteps(const Config& config, std::int64_t count) : config_(config) {
  std::vector<std::string> notes;
  PlannedRun run(config, plan_costs(config, notes));
  run.keep_ops();
  for (std::int64_t step = 0; step < count; ++step) {
    PlannedRun::Step next = run.next();
    steps_.push_back({std::move(next.plan), std::move(next.simulated)});
  }
}

nlohmann::ordered_json SimulatedSteps::json() const {
  const auto of = [&](const auto& value) { return mean(steps_, value); };
  std::int64_t tokens = 0;
  PipelineSeconds pipelines;
  for (const Step& step : steps_)
    tokens += tokens_of(step.plan), pipelines.add(step.simulated.pipelines);
  const double step_s = of([](const SimulatedStep& s) { return s.step_s; });
  nlohmann::ordered_json terms = nlohmann::ordered_json::object();
  for (const Step& step : steps_)
    for (const auto& [name, seconds] : step.simulated.terms.list())
      terms[name] = terms.value(name, 0.0) + seconds / static_cast<double>(steps_.size());
  return {{"steps", steps_.size()},
          {"step_s", step_s},
          {"schedule_s", of([](const SimulatedStep& s) { return s.schedule_s; })},
          {"load_balance", of([](const SimulatedStep& s) { return s.load_balance; })},
          {"idle_ranks", of([](const SimulatedStep& s) { return double(s.idle_ranks); })},
          {"bubble_ratio", pipelines.bubble_ratio()},
          {"tokens_per_s", static_cast<double>(tokens) / (step_s * double(steps_.size()))},
          {"terms", terms}};
}

std::vector<Event> SimulatedSteps::events(std::int64_t step, const MeshCoordinates& at,
                                          double begin_s) const {
  const SimulatedStep& s = steps_.at(static_cast<std::size_t>(step)).simulated;
  const LaneStage& lane =
      s.lanes.at(static_cast<std::size_t>(at.dp)).at(static_cast<std::size_t>(at.pp));
  std::vector<Event> out;
  Event whole;
  whole.step = static_cast<std::int32_t>(step);
  whole.stage = at.pp;
  const auto add = [&](Event e, EventKind kind, double from_s, double to_s) {
    if (to_s < from_s || (to_s == from_s && !is_schedule_op(kind))) return;
    e.kind = kind;
    e.begin_s = begin_s + from_s;
    e.end_s = begin_s + to_s;
    out.push_back(e);
  };
  add(whole, EventKind::step, 0, s.step_s);
  const double busy_s = lane.parts.total_s();
  const double ring = busy_s > 0 ? lane.parts.ring_s / busy_s : 0;
  const double exchange = busy_s > 0 ? lane.parts.exchange_s / busy_s : 0;
  for (const TimedOp& timed : lane.ops) {
    Event e = whole;
    e.micro_batch = timed.op.micro_batch;
    e.chunk = timed.op.chunk;
    const EventKind kind = event_kind(timed.op.kind);
    add(e, kind, timed.begin_s, timed.end_s);
    if (!computes(kind)) continue;
    const double length = timed.end_s - timed.begin_s, waits = timed.end_s - ring * length;
    add(e, EventKind::sequence_exchange, waits - exchange * length, waits);
    add(e, EventKind::ring_wait, waits, timed.end_s);
  }
  const double gather = s.step_s - s.terms.gather_s, update = gather - s.terms.optimizer_s;
  const double reduced = s.terms.reduction_s - lane.round_s;
  add(whole, EventKind::gradient_reduce, std::max(lane.end_s, update - reduced), update);
  add(whole, EventKind::optimizer, std::max(lane.end_s, update), gather);
  add(whole, EventKind::parameter_gather, std::max(lane.end_s, gather), s.step_s);
  return out;
}

bool SimulatedSteps::prepare_trace(const std::string& folder) {
  const std::string trace = folder + "/trace";
  require(!std::filesystem::exists(trace), "{} holds a trace; give a new folder", folder);
  std::error_code error;
  const bool made = std::filesystem::create_directories(folder, error);
  require(!error && access(folder.c_str(), W_OK | X_OK) == 0, "{}: {}; choose another --trace",
          folder, error ? error.message() : std::strerror(errno));
  return made;
}

void SimulatedSteps::write_trace(const std::string& folder, const CheckFacts& facts) const {
  const std::string trace = folder + "/trace";
  const MeshShape& mesh = facts.options.mesh;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    TraceWriter writer(trace, header_of(config_, mesh, rank, facts));
    const MeshCoordinates at = coordinates(mesh, rank);
    const StageFacts& stage = facts.stages.at(static_cast<std::size_t>(at.pp));
    double begin_s = 0;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const auto step = static_cast<std::int64_t>(i);
      const SimulatedStep& s = steps_[i].simulated;
      writer.events(events(step, at, begin_s));
      StepRow row{{"step_time_s", s.step_s},
                  {"schedule_s", s.schedule_s},
                  {"load_balance", s.load_balance},
                  {"imbalance", s.imbalance},
                  {"idle_ranks", s.idle_ranks},
                  {"tokens", static_cast<double>(tokens_of(steps_[i].plan))},
                  {"peak_bytes_total", static_cast<double>(stage.memory.total())}};
      for (int c = 0; c < kMemoryCategories; ++c) {
        const auto category = static_cast<MemoryCategory>(c);
        row[fmt::format("peak_bytes_{}", name(category))] =
            static_cast<double>(stage.memory[category]);
      }
      writer.step(step, row);
      if (rank == 0)
        writer.plan("step", steps_[i].plan.hash(), to_json(steps_[i].plan).dump(), step);
      begin_s += s.step_s;
    }
  }
  require_written(folder + "/deck.toml", config_.effective_deck());
}

}  // namespace ballast
