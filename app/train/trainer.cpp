#include "app/train/trainer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "app/observe/json_output.hpp"
#include "app/observe/peak_rate.hpp"
#include "app/plan/drift_sample.hpp"
#include "app/plan/expected_balance.hpp"
#include "app/plan/opened_files.hpp"
#include "app/train/model_files.hpp"
#include "app/train/pair_reference.hpp"
#include "ballast_version.hpp"
#include "core/config/deck_notes.hpp"
#include "core/config/deck_schema.hpp"
#include "core/observe/metrics.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/plan_json.hpp"
#include "io/model/huggingface.hpp"
#include "io/trace/recorded_indexes.hpp"
#include "parallel/comm/clock_alignment.hpp"
#include "parallel/comm/signals.hpp"

namespace ballast {
namespace {
constexpr double kStatusSeconds = 5;  ///< between two writes of status.json
}

Trainer::Trainer(const TrainOptions& options, const Communicator& world, const Config& config)
    : options_(options),
      session_(world, config),
      optimizer_(session_.parameters, session_.mesh.replica, config.optimizer.zero,
                 adamw_options(config), &session_.recorder, muon_options(config)),
      train_step_(session_, optimizer_),
      planner_(session_, train_step_.costs()),
      folder_(world, options.folder, !options.restart.empty()),
      log_(folder_.log(), world.rank() == 0),
      gradient_file_(config.run.dump_gradients),
      peak_flops_(dense_peak_flops(session_.device, session_.parameters.dtype())),
      overheads_(config.dst.enabled, balances_by_weight(config.batching.method)),
      sinks_([this](const std::string& text) { log_.comment(text); }) {
  const LastWords last_words = leaves_word();
  try {
    prepare(world, config);
  } catch (const CollectiveError& error) {  // status.json says what an earlier session came to
    if (world.rank() == 0) folder_.leave_word(0, "", error.what());
    throw;
  }
}

void Trainer::prepare(const Communicator& world, const Config& config) {
  together(world, [&] {
    if (world.rank() == 0) refuse_gradient_file(config);
    refuse_missing_drift_sample(config, *session_.dataset, session_.sampler);
  });
  optimizer_.reset_master_from_values();
  load_base(session_);
  Restored restored;
  if (!options_.restart.empty())
    restored = restore(session_, optimizer_, options_.restart, folder_.path(), true);
  if (!restored.path.empty()) {
    deck_changes_ = check_deck(session_, restored, options_.force_model);
    check_sample_order(session_, deck_changes_, restored);
  }
  if (restored.path.empty() && !config.model.weights.empty()) {
    load_weights(session_, optimizer_);
    session_.tokens_mark = huggingface_tokens_mark(config.model.weights);
  }
  load_pairs(session_);
  refuse_other_reference(session_, restored);
  if (!session_.reference_note.empty()) log_.comment("note: " + session_.reference_note);
  if (config.eval.every_steps > 0 && Generator::wanted(config))
    generator_.emplace(session_, planner_);
  state_ = restored.state;
  if (lengths_differ(*session_.dataset))
    expect_lengths(session_.backend,
                   std::max(config.batching.micro_batch_tokens,
                            session_.dataset->length(longest_sample(*session_.dataset))));
  session_.recorder.set_offset(align_clocks(world));
  session_.recorder.enabled = config.trace.enabled;
  if (world.rank() == 0)
    if (const std::string problem = folder_.write_deck(config.effective_deck()); !problem.empty())
      log_.comment("warning: " + problem + "; checkpoints hold the deck too");
  open_trace();
  open_sinks();
  // Before the best checkpoint is looked for, which may be among those that go.
  if (!restored.path.empty()) leave_overtaken(session_, folder_.path(), restored);
  checkpoints_.emplace(session_, optimizer_, checkpoint_options(), restored,
                       [this](const std::string& text) { log_.comment(text); });
  write_header(restored, train_step_.table_notes());
  tell_status();
}

Checkpoints::Options Trainer::checkpoint_options() {
  const CheckpointConfig& config = session_.config.checkpoint;
  return {folder_.checkpoints(),
          static_cast<int>(config.keep),
          static_cast<int>(config.max_failures),
          config.snapshot_bytes,
          config.best,
          [this] { require_folder(); }};
}

void Trainer::open_trace() {
  if (!session_.recorder.enabled) return;
  const Communicator& world = session_.mesh.world;
  const Mesh& m = session_.mesh;
  TraceHeader header;
  header.rank = world.rank();
  header.ranks = world.size();
  header.host = host_name();
  header.device = session_.device.description();
  header.mesh = m.table.at(world.rank());
  header.deck = session_.config.effective_deck();
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
  trace_.open(folder_.trace(), header);
  trace_.with([&](TraceWriter& trace) {
    const RingPlan& ring = session_.rings.of_mesh().plan;
    trace.plan("ring", ring.hash(), to_json(ring).dump(), state_.step);
  });
}

void Trainer::open_sinks() {
  const RunConfig& run = session_.config.run;
  sinks_.add("the trace",
             [&] { return std::make_unique<TraceSink>(trace_, session_.mesh.world.rank() == 0); });
  sinks_.add("the step log", [&] { return std::make_unique<LogSink>(log_, run.log_every); });
  sinks_.add("the JSON summary", [&] { return std::make_unique<JsonSink>(summary_); });
  if (session_.mesh.world.rank() != 0) return;
  if (run.json_lines)
    sinks_.add("JSON lines", [&] { return std::make_unique<JsonLinesSink>(folder_.json_lines()); });
  if (run.tensorboard)
    sinks_.add("TensorBoard's event file", [&] {
      return std::make_unique<TensorBoardSink>(folder_.tensorboard(), state_.step);
    });
}

void Trainer::write_model(const Restored& restored) {
  const Config& config = session_.config;
  log_.comment(fmt::format("model {}: {} parameters, {}", session_.options.model.preset,
                           session_.options.model.parameters(), name(session_.parameters.dtype())));
  if (const std::string note = precision_note(config, session_.parameters.dtype()); !note.empty())
    log_.comment("warning: " + note);
  if (session_.parameters.frozen_numel() > 0) {
    const LoraOptions& lora = session_.options.model.lora;
    std::vector<std::string> projections;
    for (const Projection p : lora.projections) projections.emplace_back(name(p));
    log_.comment(fmt::format("adapters of rank {} on {}: {} parameters are trained, {} are frozen",
                             lora.rank, fmt::join(projections, ", "),
                             session_.parameters.trainable_numel(),
                             session_.parameters.frozen_numel()));
  }
  if (restored.path.empty() && !config.model.weights.empty())
    log_.comment("starts from the weights in " + config.model.weights);
  const std::string note =
      session_.mesh.world.rank() == 0 ? huggingface_note(config.model.weights) : "";
  if (!note.empty()) log_.comment("note: " + note);
}

void Trainer::write_header(const Restored& restored, const std::vector<std::string>& table_notes) {
  const Config& config = session_.config;
  log_.comment(fmt::format("ballast {} ({})", version(), git_hash()));
  log_.comment(fmt::format("deck {}{}", config.from.file,
                           config.from.case_name.empty() ? "" : ", case " + config.from.case_name));
  for (const Problem& note : deck_notes(config)) log_.comment("note: " + note.message());
  const Mesh& mesh = session_.mesh;
  const auto devices = mesh.world.all_gather(session_.device.description());
  for (std::size_t r = 0; r < mesh.table.size(); ++r)
    log_.comment(mesh.table[r] + "  " + devices.at(r));
  const std::vector<std::string> tuning_notes =
      session_.tuning ? session_.tuning->notes() : std::vector<std::string>{};
  for (const std::string& note : tuning_notes) log_.comment("profile: " + note);
  for (const std::string& note : table_notes)  // of the same table: once is enough
    if (std::find(tuning_notes.begin(), tuning_notes.end(), note) == tuning_notes.end())
      log_.comment((session_.config.profile.table.empty() ? "note: " : "profile: ") + note);
  for (const std::string& warning : mesh.warnings) log_.comment("warning: " + warning);
  if (!session_.backend.note.empty()) log_.comment(session_.backend.note);
  write_model(restored);
  log_.comment(fmt::format("data {}: {} training samples, {} held out; {}",
                           session_.dataset->description(), session_.sampler.training_samples(),
                           session_.sampler.validation().size(),
                           loss_share_text(*session_.dataset)));
  if (const Curriculum& curriculum = session_.options.curriculum; curriculum.steps > 0)
    log_.comment(curriculum_text(curriculum, session_.sampler.short_steps()));
  const Key of_groups = key_filling(&default_config().batching.groups).path();
  if (const auto groups = config.from.of(of_groups); groups.origin == Origin::profile_table)
    log_.comment(fmt::format("packing groups of {}: {} tokens on {} ranks", groups.place,
                             to_text(config.batching.groups),
                             to_text(config.batching.group_ranks)));
  log_.comment(fmt::format(
      "mfu is relative to {:.1f} GFLOP/s a rank (dense matrix product){}", peak_flops_ * 1e-9,
      session_.options.attention.sparse()
          ? "; pairs that sparse attention leaves out count too, so it can pass 1"
          : ""));
  for (const std::string& warning : restored.warnings) log_.comment("warning: " + warning);
  for (const DeckDifference& change : deck_changes_) log_.comment("deck: " + change.text());
  if (!restored.path.empty())
    log_.comment(fmt::format("continues {} after step {}", restored.path, state_.step));
  else if (!options_.restart.empty())
    log_.comment("no checkpoint to continue: starts from the beginning");
}

LastWords Trainer::leaves_word() {
  return LastWords([this](const std::string& why) {
    folder_.leave_word(state_.step, checkpoints_ ? checkpoints_->newest() : "", why);
  });
}

int Trainer::run() {
  const std::int64_t steps = session_.config.run.steps,
                     every = session_.config.checkpoint.every_steps;
  StopReason stop = StopReason::none;
  const LastWords last_words = leaves_word();
  while (state_.step < steps && stop == StopReason::none) {
    step();
    const bool best =
        validates_after(state_.step) && checkpoints_->is_best(validate(), state_.step);
    const bool due = best || (every > 0 && state_.step % every == 0);
    checkpoints_->after_step(state_, due);
    tell_status();
    stop = agreed_stop(session_.mesh.world, past_deadline());
  }
  return finish(stop);
}

void Trainer::require_folder() {
  check_all(
      session_.mesh.world, folder_.stands(),
      fmt::format("run folder {} was replaced while this run was at work, which writes nothing "
                  "more there; its checkpoints are where its folder is now: continue it "
                  "there (-d FOLDER -r latest)",
                  folder_.path()));
}

void Trainer::tell_status() {
  const double now = session_.recorder.now();
  if (checkpoints_->newest() == told_checkpoint_ && now - told_s_ < kStatusSeconds) return;
  told_checkpoint_ = checkpoints_->newest();
  told_s_ = now;
  folder_.write_status("running", state_.step, told_checkpoint_);
}

void Trainer::note_failure(const std::string& why) {
  folder_.write_status("failed", state_.step, checkpoints_->newest(), why);
}

bool Trainer::validates_after(std::int64_t step) const {
  const std::int64_t every = session_.config.eval.every_steps;
  return every > 0 && step % every == 0 && !session_.sampler.validation().empty();
}

bool Trainer::past_deadline() const {
  if (options_.wall_time_s <= 0) return false;
  double evaluation_s = longest_evaluation_s_;
  if (evaluation_s == 0 && validates_after(state_.step + 1)) {
    // None was measured in this start: its tokens take what those of the last step took.
    std::int64_t tokens = 0;
    for (const std::int64_t sample : session_.sampler.evaluated(session_.config.eval.samples))
      tokens += session_.dataset->length(sample);
    if (generator_) tokens += generator_->tokens();
    evaluation_s = last_token_s_ * static_cast<double>(tokens);
  }
  // What must still fit, at the longest times measured, with a quarter more: load varies.
  const double reserve_s = 1.25 * (longest_step_s_ + evaluation_s + checkpoints_->longest_s());
  return process_seconds() > options_.wall_time_s - reserve_s;
}

double Trainer::validate() {
  const double begin = session_.recorder.now();
  const Evaluation result = evaluate(session_, planner_, session_.config.eval.samples);
  EvaluationFigures figures{state_.step, result.scalars(), {}, {}};
  if (generator_) {
    const std::vector<GeneratedText> texts = generator_->run();
    figures.generated = generated_json(texts);
    figures.texts = generated_lines(texts);
  }
  longest_evaluation_s_ = std::max(longest_evaluation_s_, session_.recorder.now() - begin);
  sinks_.evaluation(figures);
  nlohmann::ordered_json found;
  result.write(found);
  for (const char* key : {"needle_accuracy", "needle"})
    if (found.contains(key)) summary_[key] = found[key];
  return result.loss;
}

int Trainer::finish(StopReason stop) {
  const bool finished = state_.step >= session_.config.run.steps;
  require_folder();
  checkpoints_->finish(state_, !finished || session_.config.checkpoint.at_end);
  trace_.with([&](TraceWriter& trace) {
    session_.recorder.flush([&](std::span<const Event> events) { trace.events(events); });
    trace.flush();
  });
  summary_["finished"] = finished;
  for (const auto& [key, share] : overheads_.shares()) {
    log_.comment(fmt::format("{} = {:.6f}: {:.3f} % of the step on the rank that spends most", key,
                             share, 100 * share));
    summary_[key] = share;
  }
  if (session_.mesh.world.rank() == 0) {
    try {
      write_json(options_.json, summary_);
    } catch (const std::exception& error) {  // what was trained counts
      log_.comment(fmt::format("warning: {}", error.what()));
    }
  }
  folder_.write_status(finished ? "finished" : "stopped", state_.step, checkpoints_->newest(),
                       name(stop));
  log_.comment(finished ? fmt::format("finished after step {}", state_.step)
                        : fmt::format("stopped after step {} ({}); continue with -r latest",
                                      state_.step, name(stop)));
  return finished ? 0 : 75;
}

void Trainer::step() {
  Recorder& recorder = session_.recorder;
  const double begin = recorder.now();
  recorder.context.step = static_cast<std::int32_t>(state_.step);
  const auto whole = recorder.enabled ? recorder.begin(EventKind::step) : -1;

  // Plan: the same on every rank.
  const PlannedStep planned = [&] {
    Scope scope(&recorder, EventKind::planning);
    return planner_.next(state_.step, state_.sampler, session_.config.run.steps);
  }();
  const StepPlan& plan = planned.plan;
  store(planned);
  if (!balance_told_) tell_balance(plan);
  reset_peak_memory();
  const TrainStep::Gradients found = train_step_.compute(plan);
  if (session_.tuning)
    trace_.with([&](TraceWriter& trace) {
      if (const std::string budgets = session_.tuning->choices(); !budgets.empty())
        trace.plan("budgets", std::hash<std::string>()(budgets), budgets, state_.step);
    });
  if (!std::isfinite(found.loss) || !std::isfinite(found.norm)) stop_at_nonfinite(plan, found);
  if (!gradient_file_.empty())
    dump_gradients(std::exchange(gradient_file_, ""), session_, optimizer_);
  const std::int64_t next = state_.step + 1;
  checkpoints_->release();
  const double rate = train_step_.update(found.norm, next);

  // Observe.
  session_.device.settle();
  if (whole >= 0) recorder.end(whole);
  const double seconds = recorder.now() - begin;
  longest_step_s_ = std::max(longest_step_s_, seconds);
  last_token_s_ = seconds / static_cast<double>(plan.tokens());
  state_.step = next;
  state_.sampler = planned.after;
  state_.tokens_seen += plan.tokens();
  state_.seconds_trained += seconds;
  StepOutcome outcome;
  outcome.step = next;
  outcome.loss = found.loss;
  outcome.norm = found.norm;
  if (found.pairs) outcome.pairs = pair_figures(*found.pairs);
  outcome.rate = rate;
  outcome.seconds = seconds;
  outcome.plan_s = planned.planning_s;
  observe(plan, outcome);
}

void Trainer::tell_balance(const StepPlan& plan) {
  balance_told_ = true;
  const Costs* costs = train_step_.costs();
  if (costs == nullptr || session_.mesh.world.rank() != 0) return;
  const SimulationOptions options = simulation_options(session_.config, session_.options);
  try {
    log_.comment(expected_balance(session_.config, plan, simulate(plan, options, *costs)));
  } catch (const Error& e) {  // a step runs whether it can be timed or not
    log_.comment(fmt::format("balance of step {} cannot be told: {}", plan.step + 1, e.what()));
  }
}

void Trainer::store(const PlannedStep& planned) {
  const std::int64_t every = session_.config.trace.plans_every;
  if (!trace_ || session_.mesh.world.rank() != 0 || every == 0 || state_.step % every != 0) return;
  trace_.with([&](TraceWriter& trace) {
    trace.plan("step", planned.plan.hash(), planned.text, state_.step);
  });
}

double Trainer::predict(const StepPlan& plan) {
  SimulationOptions options = simulation_options(session_.config, session_.options);
  options.keep_ops = true;
  const SimulatedStep simulated = simulate(plan, options, *train_step_.costs());
  predicted_terms_ = simulated.terms;
  if (trace_) {
    const MeshCoordinates& at = session_.mesh.at;
    std::vector<Event> ops;
    for (const TimedOp& timed : simulated.lanes.at(static_cast<std::size_t>(at.dp))
                                    .at(static_cast<std::size_t>(at.pp))
                                    .ops) {
      Event& e = ops.emplace_back();
      e.step = static_cast<std::int32_t>(state_.step - 1);
      e.micro_batch = timed.op.micro_batch;
      e.chunk = timed.op.chunk;
      e.stage = at.pp;
      e.kind = event_kind(timed.op.kind);
      e.begin_s = timed.begin_s;
      e.end_s = timed.end_s;
    }
    trace_.with([&](TraceWriter& trace) { trace.predicted(ops); });
  }
  return session_.mesh.world.all_reduce(simulated.schedule_s, Reduction::max);
}

/// What this rank writes of rows that all ranks of a micro-batch's ring have alike.
template <class Row>
static std::vector<Row> once_a_ring(const StepPlan& plan, const Mesh& mesh, std::vector<Row> rows) {
  std::erase_if(rows, [&](const Row& row) {
    return mesh.ring(plan.micro_batch(mesh.at.dp, row.micro_batch).group.ranks).rank() != 0;
  });
  return rows;
}

void Trainer::observe(const StepPlan& plan, StepOutcome outcome) {
  const std::size_t mine =
      plan.lanes.at(static_cast<std::size_t>(session_.mesh.at.dp)).micro_batches.size();
  EventSums sums = sum_events({}, outcome.step - 1, mine);
  session_.recorder.flush([&](std::span<const Event> events) {
    sums = sum_events(events, outcome.step - 1, mine);
    trace_.with([&](TraceWriter& trace) { trace.events(events); });
  });
  if (outcome.predicts = train_step_.predicts(); outcome.predicts)
    outcome.predicted_s = predict(plan);
  const std::vector<BudgetRow> budgets = session_.recorder.take_budgets();
  trace_.with([&](TraceWriter& trace) { trace.budgets(budgets); });
  sums.recorded = session_.recorder.enabled;
  add_budgets(sums, once_a_ring(plan, session_.mesh, budgets));
  const std::vector<IndexRow> indexes =
      once_a_ring(plan, session_.mesh, session_.recorder.take_indexes());
  if (!indexes.empty())
    trace_.with([&](TraceWriter& trace) {
      if (trace.in_place()) append_indexes(folder_.indexes(), session_.mesh.world.rank(), indexes);
    });
  sums.recall = store_recall(plan);
  add_drift(sums, measure_drift(outcome.step - 1));
  outcome.steps = session_.config.run.steps;
  outcome.trained_s = state_.seconds_trained;
  outcome.flops = session_.training_flops(plan);
  outcome.peak_flops = peak_flops_;
  StepStatistics statistics = measure(outcome, sums, plan, session_.mesh);
  if (const auto& s = statistics.schedule; s && session_.mesh.world.rank() == 0)
    if (const std::string off =
            prediction_warning_.look(outcome.step, s->measured_s, s->predicted_s, predicted_terms_);
        !off.empty())
      log_.comment(off);
  if (session_.tuning) statistics.budgets = session_.tuning->facts();
  if (session_.recorder.enabled) overheads_.add(statistics.most_spent, outcome.seconds);
  sinks_.step(statistics);
}

std::vector<DriftRow> Trainer::measure_drift(std::int64_t step) {
  const TraceConfig& trace = session_.config.trace;
  if (!measures_drift(session_.config, session_.options.attention) ||
      step % trace.recall_every != 0)
    return {};
  if (!drift_)
    drift_.emplace(session_, planner_,
                   drift_sample(session_.config, *session_.dataset, session_.sampler,
                                session_.options.attention)
                       .value());
  std::vector<DriftRow> rows = drift_->measure();
  if (!rows.empty())
    trace_.with([&](TraceWriter& to) {
      const std::string text = drift_json(step, rows);
      to.plan("drift", std::hash<std::string>()(text), text, step);
    });
  return rows;
}

RecallSums Trainer::store_recall(const StepPlan& plan) {
  const std::vector<RecallRow> recall =
      once_a_ring(plan, session_.mesh, session_.recorder.take_recalls());
  const std::vector<CoverageRow> coverage =
      once_a_ring(plan, session_.mesh, session_.recorder.take_coverage());
  const auto store = [&](const char* kind, const auto& rows, const std::string& text) {
    if (rows.empty()) return;
    trace_.with([&](TraceWriter& trace) {
      trace.plan(kind, std::hash<std::string>()(text), text, rows.front().step);
    });
  };
  store("recall", recall, recall_json(recall));
  if (session_.mesh.at.sp == 0) store("coverage", coverage, coverage_json(coverage));
  return sum_recall(recall, session_.options.model.query_heads);
}

void Trainer::stop_at_nonfinite(const StepPlan& plan, const TrainStep::Gradients& found) {
  const MicroBatchLosses& losses = found.losses;
  // Ranks that share a micro-batch find the culprit together, wherever it stands in their lists: so
  // those that hold the first one of the plan look at it, and nobody else at any.
  const std::vector<int>& ids =
      plan.lanes.at(static_cast<std::size_t>(session_.mesh.at.dp)).micro_batches;
  std::int64_t id = std::numeric_limits<std::int64_t>::max();
  for (std::size_t m = 0; m < losses.size(); ++m)
    if (!std::isfinite(losses[m])) id = std::min<std::int64_t>(id, ids.at(m));
  id = session_.mesh.world.all_reduce(id, Reduction::min);
  const auto place = std::find(ids.begin(), ids.end(), id);
  std::string where;
  if (place != ids.end()) {
    const int first = static_cast<int>(place - ids.begin());
    const std::vector<MicroBatch> mine = plan.list(session_.mesh.at.dp);
    ChunkStores stores = session_.chunk_stores(plan);
    const auto prepare = [&](int m) { return session_.prepare(plan, m, 0, stores.at(m)); };
    // A dependent chunk attends to the keys of the chunks before it.
    std::vector<int> before;
    for (const auto& group : chunk_groups(mine))
      if (const auto at = std::find(group.begin(), group.end(), first); at != group.end())
        before.assign(group.begin(), at);
    if (!before.empty())
      run_stage(forward_schedule({before}, session_.links.stages()), static_cast<int>(mine.size()),
                session_.model, session_.links, {prepare, {}, {}, nullptr}, nullptr);
    MicroBatchWork work = prepare(first);
    const int layer = first_nonfinite_layer(work, session_.model, session_.links);
    if (layer >= 0 || !std::isfinite(losses.at(static_cast<std::size_t>(first))))
      where = fmt::format("micro-batch {} of data-parallel rank {}, {}", first, session_.mesh.at.dp,
                          layer < 0 ? std::string("the head (every layer's output is finite)")
                                    : fmt::format("layer {}", layer));
  }
  const auto text = [](double value) {  // the sign of a NaN says nothing
    return std::isnan(value) ? std::string("nan") : fmt::to_string(value);
  };
  const std::string what = fmt::format("step {}: loss = {}, gradient norm = {}", state_.step + 1,
                                       text(found.loss), text(found.norm));
  // The state before this step may be the culprit, so the file to go back to is an older one.
  const std::string older = checkpoints_->before(state_.step);
  const std::string remedy = fmt::format(
      "no checkpoint was replaced; {} the data of this step, then {}",
      state_.step == 0 ? "nothing was learnt yet: look at the weights that the run began with and"
                       : "lower optimizer.learning_rate or look at",
      older.empty() ? "begin anew: there is no checkpoint of an earlier state"
                    : "continue with -r " + older);
  check_all(session_.mesh.world, where.empty(),
            fmt::format("{}; first seen in {}; {}", what, where, remedy));
  check_all(session_.mesh.world, false,
            fmt::format("{}; every micro-batch's loss is finite, so it arose in backward; {}", what,
                        remedy));
  std::abort();  // check_all(false) throws
}

}  // namespace ballast
