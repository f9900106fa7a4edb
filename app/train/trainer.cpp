#include "app/train/trainer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <utility>

#include "app/command/eval.hpp"
#include "app/measure/peak_rate.hpp"
#include "app/observe/json_output.hpp"
#include "app/train/deck_options.hpp"
#include "app/train/model_files.hpp"
#include "ballast_version.hpp"
#include "core/config/deck_effect.hpp"
#include "core/observe/metrics.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "parallel/comm/clock_alignment.hpp"
#include "parallel/comm/signals.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

std::string describe(const Batch& batch) {
  std::string text;
  for (std::size_t d = 0; d < batch.micro_batches.size(); ++d)
    for (std::size_t m = 0; m < batch.micro_batches[d].size(); ++m) {
      const MicroBatch& micro_batch = batch.micro_batches[d][m];
      text += fmt::format("dp {} micro_batch {}", d, m);
      if (micro_batch.sp > 1) text += fmt::format(" sp {}", micro_batch.sp);
      if (micro_batch.recompute_layers >= 0)
        text += fmt::format(" recompute {}", micro_batch.recompute_layers);
      text += ':';
      for (const Segment& s : micro_batch.segments)
        text += fmt::format(" {}[{},{})", s.sample, s.begin, s.end);
      text += '\n';
    }
  return text;
}

std::string describe(const RingPlan& plan) {
  std::string text = fmt::format("rank {} of {} x {}\n", plan.rank, plan.outer, plan.inner);
  for (const auto& [pass, steps] :
       {std::pair{"forward", &plan.forward}, {"backward", &plan.backward}})
    for (const RingStep& step : *steps) {
      text += fmt::format("{} {}.{} shard {}", pass, step.outer, step.inner, step.shard);
      for (const auto& [what, hop] : {std::pair{"kv", &step.kv_inner},
                                      {"kv", &step.kv_outer},
                                      {"dkv", &step.dkv_inner},
                                      {"dkv", &step.dkv_outer}})
        if (*hop)
          text += fmt::format("; {} {} of shard {} to {}",
                              (*hop)->level == RingLevel::inner ? "inner" : "outer", what,
                              (*hop)->send_shard, (*hop)->to);
      text += '\n';
    }
  return text;
}

std::string describe(const Schedule& schedule) {
  std::string text;
  for (std::size_t s = 0; s < schedule.stages.size(); ++s)
    for (const Op& op : schedule.stages[s]) {
      text += fmt::format("stage {} {} {} {}", s, name(op.kind), op.micro_batch, op.chunk);
      if (op.peer >= 0)
        text += fmt::format(" {} {}", op.payload == Payload::activation ? "activation" : "gradient",
                            op.peer);
      text += '\n';
    }
  return text;
}

}  // namespace

Trainer::Trainer(const CommandLine& line, const Communicator& world, const Deck& deck)
    : line_(line),
      session_(world, deck),
      folder_(world, line.output_folder(deck), !line.restart.empty()),
      optimizer_(session_.parameters, session_.mesh.replica,
                 static_cast<int>(deck.integer("optimizer.zero")), adamw_options(deck),
                 &session_.recorder),
      train_step_(session_, optimizer_),
      log_(folder_.log(), world.rank() == 0),
      gradient_file_(deck.text("run.dump_gradients")),
      peak_flops_(dense_peak_flops(session_.device, session_.parameters.dtype())),
      overheads_(overheads(deck)) {
  optimizer_.reset_master_from_values();
  load_base(session_);
  Restored restored;
  if (!line.restart.empty())
    restored = restore(session_, optimizer_, line.restart, folder_.path(), true);
  if (!restored.path.empty()) check_sample_order(session_, restored);
  if (restored.path.empty() && !deck.text("model.weights").empty())
    load_weights(session_, optimizer_);
  state_ = restored.state;
  last_saved_ = restored.path.empty() ? -1 : state_.step;
  session_.recorder.set_offset(align_clocks(world));
  started_s_ = session_.recorder.now();
  session_.recorder.enabled = deck.boolean("trace.enabled");
  set_wait_limit(deck.real("run.hang_timeout_s"), &session_.recorder);
  together(world, [&] {
    if (world.rank() == 0) {
      std::ofstream file(folder_.deck());
      file << deck.effective_toml();
      require(file.good(), "{} cannot be written; is the disk full?", folder_.deck());
    }
    if (!session_.recorder.enabled) return;
    const Mesh& m = session_.mesh;
    TraceHeader header;
    header.rank = world.rank();
    header.ranks = world.size();
    header.host = host_name();
    header.device = session_.device.description();
    header.mesh = m.table.at(world.rank());
    header.deck = deck.effective_toml();
    header.git_hash = git_hash();
    header.mesh_degrees = {{"dp", m.shape.dp},
                           {"pp", m.shape.pp},
                           {"cp_outer", m.shape.cp_outer},
                           {"cp_inner", m.shape.cp_inner},
                           {"sp", m.shape.sp},
                           {"tp", m.shape.tp}};
    header.coordinates = {
        {"dp", m.at.dp}, {"pp", m.at.pp}, {"cp_outer", m.at.cp_outer}, {"cp_inner", m.at.cp_inner},
        {"sp", m.at.sp}, {"tp", m.at.tp}};
    header.segment = static_cast<int>(state_.step);
    trace_ = std::make_unique<TraceWriter>(folder_.trace(), header);
  });
  open_sinks();
  if (trace_)
    trace_->plan("ring", session_.ring.plan.hash(), describe(session_.ring.plan), state_.step);
  write_header(restored, train_step_.table_notes());
}

void Trainer::open_sinks() {
  if (trace_) sinks_.push_back(std::make_unique<TraceSink>(*trace_));
  sinks_.push_back(std::make_unique<LogSink>(log_, session_.deck.integer("run.log_every")));
  sinks_.push_back(std::make_unique<JsonSink>(summary_));
}

void Trainer::write_header(const Restored& restored, const std::vector<std::string>& table_notes) {
  const Deck& deck = session_.deck;
  log_.comment(fmt::format("ballast {} ({})", version(), git_hash()));
  log_.comment(fmt::format("deck {}{}", deck.file,
                           deck.case_name.empty() ? "" : ", case " + deck.case_name));
  for (const std::string& note : without_effect(deck)) log_.comment("note: " + note);
  const Mesh& mesh = session_.mesh;
  const auto devices = mesh.world.all_gather(session_.device.description());
  for (std::size_t r = 0; r < mesh.table.size(); ++r)
    log_.comment(mesh.table[r] + "  " + devices.at(r));
  const std::vector<std::string> tuning_notes =
      session_.tuning ? session_.tuning->notes() : std::vector<std::string>{};
  for (const std::string& note : tuning_notes) log_.comment("profile: " + note);
  for (const std::string& note : table_notes)  // of the same table: once is enough
    if (std::find(tuning_notes.begin(), tuning_notes.end(), note) == tuning_notes.end())
      log_.comment("profile: " + note);
  for (const std::string& warning : mesh.warnings) log_.comment("warning: " + warning);
  if (!session_.backend.note.empty()) log_.comment(session_.backend.note);
  log_.comment(fmt::format("model {}: {} parameters, {}", session_.options.model.preset,
                           session_.options.model.parameters(), name(session_.parameters.dtype())));
  if (session_.parameters.frozen_numel() > 0) {
    const LoraOptions& lora = session_.options.model.lora;
    std::vector<std::string> projections;
    for (const Projection p : lora.projections) projections.emplace_back(name(p));
    log_.comment(fmt::format("adapters of rank {} on {}: {} parameters are trained, {} are frozen",
                             lora.rank, fmt::join(projections, ", "),
                             session_.parameters.trainable_numel(),
                             session_.parameters.frozen_numel()));
  }
  if (restored.path.empty() && !deck.text("model.weights").empty())
    log_.comment("starts from the weights in " + deck.text("model.weights"));
  log_.comment(fmt::format("data {}: {} training samples, {} held out",
                           session_.dataset->description(), session_.sampler.training_samples(),
                           session_.sampler.validation().size()));
  if (const std::int64_t steps = session_.options.curriculum.steps; steps > 0)
    log_.comment(fmt::format(
        "curriculum: the first {} steps take samples of at most {} tokens{}",
        session_.sampler.short_steps(), session_.options.curriculum.max_tokens,
        session_.sampler.short_steps() < steps
            ? fmt::format(" (curriculum.steps = {}: the epoch has no more short ones)", steps)
            : ""));
  if (const std::string place = deck.place("batching.groups"); place.starts_with("profile table"))
    log_.comment(fmt::format("packing groups of {}: {} tokens on {} ranks", place,
                             to_text(deck.value("batching.groups")),
                             to_text(deck.value("batching.group_ranks"))));
  log_.comment(fmt::format(
      "mfu is relative to {:.1f} GFLOP/s a rank (dense matrix product){}", peak_flops_ * 1e-9,
      session_.options.attention.sparse()
          ? "; pairs that sparse attention leaves out count too, so it can pass 1"
          : ""));
  for (const std::string& warning : restored.warnings) log_.comment("warning: " + warning);
  if (!restored.path.empty())
    log_.comment(fmt::format("continues {} after step {}", restored.path, state_.step));
  else if (!line_.restart.empty())
    log_.comment("no sound checkpoint to continue: starts from the beginning");
}

int Trainer::run() {
  const std::int64_t steps = session_.deck.integer("run.steps"),
                     every = session_.deck.integer("checkpoint.every_steps");
  const std::int64_t validate = session_.deck.integer("eval.every_steps");
  StopReason stop = StopReason::none;
  while (state_.step < steps && stop == StopReason::none) {
    step();
    if (every > 0 && state_.step % every == 0) checkpoint();
    if (validate > 0 && state_.step % validate == 0 && !session_.sampler.validation().empty()) {
      const Evaluation result = evaluate(session_, session_.deck.integer("eval.samples"));
      StepFields fields{{"step", fmt::to_string(state_.step)},
                        {"validation_loss", fmt::format("{:.6f}", result.loss)},
                        {"validation_tokens", fmt::to_string(result.loss_tokens)}};
      if (!result.needle.lengths.empty())
        fields.emplace_back("needle_accuracy",
                            fmt::format("{:.4f}", result.needle.total().accuracy()));
      log_.step(fields);
      nlohmann::ordered_json found;
      result.write(found);
      summary_["validation_loss"] = result.loss;
      for (const char* key : {"needle_accuracy", "needle"})
        if (found.contains(key)) summary_[key] = found[key];
      if (trace_) trace_->step(state_.step - 1, result.scalars());
    }
    // One more step, and a checkpoint of about its length, must still fit.
    const double deadline =
        line_.wall_time_s > 0 ? started_s_ + line_.wall_time_s - 2 * longest_step_s_ : 0;
    stop = agreed_stop(session_.mesh.world, deadline > 0 && session_.recorder.now() > deadline);
  }
  if (state_.step < steps || session_.deck.boolean("checkpoint.at_end")) checkpoint();
  if (trace_) {
    session_.recorder.flush([&](std::span<const Event> events) { trace_->events(events); });
    trace_->flush();
  }
  summary_["finished"] = state_.step >= steps;
  for (const auto& [key, share] : overheads_.shares()) {
    log_.comment(fmt::format("{} = {:.6f}: {:.3f} % of the step on the rank that spends most", key,
                             share, 100 * share));
    summary_[key] = share;
  }
  if (session_.mesh.world.rank() == 0) write_json(line_.json, summary_);
  if (state_.step >= steps) {
    log_.comment(fmt::format("finished after step {}", state_.step));
    return 0;
  }
  log_.comment(
      fmt::format("stopped after step {} ({}); continue with -r latest", state_.step, name(stop)));
  return 75;
}

void Trainer::step() {
  Recorder& recorder = session_.recorder;
  const double begin = recorder.now();
  recorder.context.step = static_cast<std::int32_t>(state_.step);
  const auto whole = recorder.enabled ? recorder.begin(EventKind::step) : -1;

  // Plan: the same on every rank.
  const auto samples = session_.window.next(session_.sampler, state_.sampler, [&](std::int64_t s) {
    return session_.dataset->length(s);
  });
  const auto plan_begin = std::chrono::steady_clock::now();
  const Batch batch = [&] {
    Scope scope(&recorder, EventKind::planning);
    return session_.plan(state_.step, samples);
  }();
  const Schedule schedule = train_step_.schedule(batch);
  const double plan_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - plan_begin).count();
  if (trace_) {
    trace_->plan("batch", batch.hash(), describe(batch), state_.step);
    trace_->plan("schedule", schedule.hash(), describe(schedule), state_.step);
  }
  reset_peak_memory();
  const TrainStep::Gradients found = train_step_.compute(batch, schedule);
  if (trace_ && session_.tuning)
    if (const std::string budgets = session_.tuning->describe(); !budgets.empty())
      trace_->plan("budgets", std::hash<std::string>()(budgets), budgets, state_.step);
  if (!std::isfinite(found.loss) || !std::isfinite(found.norm)) stop_at_nonfinite(batch, found);
  if (!gradient_file_.empty())
    dump_gradients(std::exchange(gradient_file_, ""), session_, optimizer_);
  const std::int64_t next = state_.step + 1;
  const double rate = train_step_.update(found.norm, next);

  // Observe.
  session_.device.synchronize();
  if (whole >= 0) recorder.end(whole);
  const double seconds = recorder.now() - begin;
  longest_step_s_ = std::max(longest_step_s_, seconds);
  state_.step = next;
  state_.tokens_seen += batch.tokens();
  state_.seconds_trained += seconds;
  StepOutcome outcome;
  outcome.step = next;
  outcome.loss = found.loss;
  outcome.norm = found.norm;
  outcome.rate = rate;
  outcome.seconds = seconds;
  outcome.plan_s = plan_s;
  observe(batch, schedule, outcome);
}

double Trainer::predict(const std::vector<MicroBatch>& mine, const Schedule& schedule) {
  const SimulatedSchedule simulated =
      simulate(schedule, train_step_.times()->of(mine, session_.options));
  if (trace_) {
    std::vector<Event> ops;
    for (const TimedOp& timed :
         simulated.stages.at(static_cast<std::size_t>(session_.mesh.at.pp))) {
      Event& e = ops.emplace_back();
      e.step = static_cast<std::int32_t>(state_.step - 1);
      e.micro_batch = timed.op.micro_batch;
      e.chunk = timed.op.chunk;
      e.stage = session_.mesh.at.pp;
      e.kind = event_kind(timed.op.kind);
      e.begin_s = timed.begin_s;
      e.end_s = timed.end_s;
    }
    trace_->predicted(ops);
  }
  return session_.mesh.world.all_reduce(simulated.step_time_s, Reduction::max);
}

void Trainer::observe(const Batch& batch, const Schedule& schedule, StepOutcome outcome) {
  const std::vector<MicroBatch> mine = batch.work_of(session_.mesh.at.dp);
  EventSums sums = sum_events({}, outcome.step - 1, mine.size());
  session_.recorder.flush([&](std::span<const Event> events) {
    sums = sum_events(events, outcome.step - 1, mine.size());
    if (trace_) trace_->events(events);
  });
  if (outcome.predicts = train_step_.times().has_value(); outcome.predicts)
    outcome.predicted_s = predict(mine, schedule);
  const std::vector<BudgetRow> budgets = session_.recorder.take_budgets();
  if (trace_) trace_->budgets(budgets);
  outcome.steps = session_.deck.integer("run.steps");
  outcome.trained_s = state_.seconds_trained;
  outcome.flops = session_.training_flops(batch);
  outcome.peak_flops = peak_flops_;
  StepStatistics statistics = measure(outcome, sums, batch, mine, session_.mesh);
  if (session_.tuning) statistics.budgets = session_.tuning->facts();
  if (session_.recorder.enabled) overheads_.add(statistics.most_spent, outcome.seconds);
  for (const auto& sink : sinks_) sink->step(statistics);
}

void Trainer::stop_at_nonfinite(const Batch& batch, const TrainStep::Gradients& found) {
  const MicroBatchLosses& losses = found.losses;
  // Ranks that share micro-batches find the culprit together, and which share may change from one
  // to the next: so all look at the same one.
  std::int64_t first = static_cast<std::int64_t>(losses.size());
  for (std::size_t m = losses.size(); m-- > 0;)
    if (!std::isfinite(losses[m])) first = static_cast<std::int64_t>(m);
  first = session_.mesh.world.all_reduce(first, Reduction::min);
  std::string where;
  if (first < static_cast<std::int64_t>(losses.size())) {
    const std::vector<MicroBatch> mine = batch.work_of(session_.mesh.at.dp);
    ChunkStores stores = session_.chunk_stores(mine);
    const auto prepare = [&](int m) {
      return session_.prepare(mine[static_cast<std::size_t>(m)], 0, stores.at(m));
    };
    // A dependent chunk attends to the keys of the chunks before it.
    std::vector<int> before;
    for (const auto& group : chunk_groups(mine))
      if (const auto at = std::find(group.begin(), group.end(), first); at != group.end())
        before.assign(group.begin(), at);
    if (!before.empty())
      run_stage(forward_schedule({before}, session_.links.stages()), static_cast<int>(mine.size()),
                session_.model, session_.links, {prepare, {}, {}, nullptr}, nullptr);
    MicroBatchWork work = prepare(static_cast<int>(first));
    const int layer = first_nonfinite_layer(work, session_.model, session_.links);
    if (layer >= 0 || !std::isfinite(losses[first]))
      where = fmt::format("micro-batch {} of data-parallel rank {}, {}", first, session_.mesh.at.dp,
                          layer < 0 ? std::string("the head (every layer's output is finite)")
                                    : fmt::format("layer {}", layer));
  }
  const std::string what = fmt::format("step {}: loss = {}, gradient norm = {}", state_.step + 1,
                                       found.loss, found.norm);
  const std::string remedy =
      "nothing was overwritten; lower optimizer.learning_rate or look at the data of this step, "
      "then continue with -r latest";
  check_all(session_.mesh.world, where.empty(),
            fmt::format("{}; first seen in {}; {}", what, where, remedy));
  check_all(session_.mesh.world, false,
            fmt::format("{}; every micro-batch's loss is finite, so it arose in backward; {}", what,
                        remedy));
  std::abort();  // check_all(false) throws
}

void Trainer::checkpoint() {
  if (last_saved_ == state_.step) return;
  const std::string path = save(session_, optimizer_, state_, folder_.checkpoints());
  last_saved_ = state_.step;
  log_.comment("checkpoint " + path);
}

int train_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Deck deck = line.deck(world);
  catch_stop_signals();
  return Trainer(line, world, deck).run();
}

}  // namespace ballast
