#include "app/command/eval.hpp"

#include <algorithm>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/train/checkpointing.hpp"
#include "app/train/generation.hpp"
#include "app/train/model_files.hpp"
#include "app/train/pair_reference.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {

Evaluation evaluate(Session& session, StepPlanner& planner, std::int64_t samples) {
  Scope scope(&session.recorder, EventKind::validation);
  const bool was_enabled = session.recorder.enabled;
  session.recorder.enabled =
      false;  // one event for the whole pass: its micro-batches are not those of a training step
  std::vector<std::int64_t> chosen = session.sampler.validation();
  if (samples > 0 && static_cast<std::int64_t>(chosen.size()) > samples) chosen.resize(samples);
  const StepPlan plan = planner.evaluation(chosen);
  const std::vector<MicroBatch> mine = plan.list(session.mesh.at.dp);
  double loss = 0;
  PairSums pairs;
  Evaluation result;
  NeedleJudge judge(*session.dataset, chosen);
  ChunkStores stores = session.chunk_stores(plan);
  const auto prepare = [&](int m) {
    MicroBatchWork work = session.prepare(plan, m, 0, stores.at(m),
                                          session.tuning ? session.tuning->base_policy() : nullptr);
    work.batch.judged = judge.has_questions();
    return work;
  };
  const auto take = [&](int m, const LocalBatch& local, const StageOutput& output) {
    if (session.pairs)
      session.pairs->judge(mine[m], local.segment, output.token_loss, pairs);
    else
      loss += output.loss_sum();
    judge.add(mine[m], local, output);
    result.positions.add(local, output);
  };
  run_stage(plan.schedule(session.mesh.at.dp), static_cast<int>(mine.size()), session.model,
            session.links, {prepare, {}, take, nullptr}, nullptr);
  session.recorder.enabled = was_enabled;
  result.positions.reduce(session.mesh.world);
  result.loss_tokens = plan.loss_tokens;
  result.samples = plan.samples();
  loss =
      session.mesh.pp.all_reduce(session.mesh.replica.all_reduce(loss));  // the last stage has it
  result.loss = result.loss_tokens > 0 ? loss / static_cast<double>(result.loss_tokens) : 0;
  if (session.pairs) {
    std::vector<double> sums = pairs.numbers();
    session.mesh.replica.all_reduce(std::span<double>(sums));
    session.mesh.pp.all_reduce(std::span<double>(sums));
    const PairSums means = PairSums::from(sums.data()).means();
    result.pairs = pair_figures(means);
    result.loss = means.loss;
  }
  result.needle = judge.result(session.mesh.world, session.config.eval.depths);
  return result;
}

StepRow Evaluation::scalars() const {
  StepRow row = needle.scalars();
  row["validation_loss"] = loss;
  if (pairs) {
    row["validation_rewards_margin"] = pairs->margin;
    row["validation_rewards_accuracy"] = pairs->accuracy;
  }
  row["validation_tokens"] = static_cast<double>(loss_tokens);
  return row;
}

void Evaluation::write(nlohmann::ordered_json& json) const {
  json["validation_loss"] = loss;
  json["loss_tokens"] = loss_tokens;
  json["samples"] = samples;
  if (pairs) {
    json["rewards_margin"] = pairs->margin;
    json["rewards_accuracy"] = pairs->accuracy;
  }
  json["loss_by_position"] = positions.json();
  if (needle.lengths.empty()) return;
  json["needle_accuracy"] = needle.total().accuracy();
  json["needle"] = needle.json();
}

int eval_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Config config = line.config(world);
  Config evaluates = config;
  evaluates.eval.every_steps = 1;  // keys of evaluations are read here
  if (world.rank() == 0) note_without_effect({&evaluates, 1});
  Session session(world, config);
  const std::string& weights = config.model.weights;
  check_all(world, !line.restart.empty() || !weights.empty(),
            "eval needs a checkpoint (-r CHECKPOINT or -r latest) or model.weights in the deck");
  check_all(world, !session.sampler.validation().empty(),
            "eval: the validation split is empty; set data.validation_share (data.needle_held_out "
            "for needle data) above 0");
  ShardedOptimizer optimizer(session.parameters, session.mesh.replica, config.optimizer.zero, {},
                             nullptr, muon_options(config));
  load_base(session);
  Restored restored;
  if (line.restart.empty()) {
    load_weights(session, optimizer);
    restored.path = weights;
  } else {
    restored = restore(session, optimizer, line.restart, line.output_folder(config), false);
    check_all(world, !restored.path.empty(),
              fmt::format("eval: no sound checkpoint in {}", line.output_folder(config)));
    const auto seed = config.run.seed;
    check_all(world, restored.state.seed == seed || config.data.source == DataSource::needle,
              fmt::format("{}: written with run.seed = {}, the deck has {}; other samples would be "
                          "held out, some of them trained on: use the same seed",
                          restored.path, restored.state.seed, seed));
  }
  load_pairs(session);
  StepPlanner planner(session, nullptr);
  const Evaluation result = evaluate(session, planner, config.eval.samples);
  std::vector<GeneratedText> texts;
  if (Generator::wanted(config)) texts = Generator(session, planner).run();
  if (world.rank() == 0) {
    for (const std::string& warning : restored.warnings) fmt::print("# warning: {}\n", warning);
    fmt::print("checkpoint={} step={} validation_loss={:.6f} loss_tokens={} samples={}\n",
               restored.path, restored.state.step, result.loss, result.loss_tokens, result.samples);
    if (result.pairs)
      fmt::print("rewards_margin={:.5f} rewards_accuracy={:.4f}\n", result.pairs->margin,
                 result.pairs->accuracy);
    fmt::print("{}", result.positions.table());
    if (!result.needle.lengths.empty())
      fmt::print("needle_accuracy={:.4f} questions={}\n{}", result.needle.total().accuracy(),
                 result.needle.total().questions, result.needle.table());
    nlohmann::ordered_json json{{"checkpoint", restored.path}, {"step", restored.state.step}};
    result.write(json);
    if (Generator::wanted(config)) json["generated"] = generated_json(texts);
    for (const std::string& line : generated_lines(texts)) fmt::print("{}\n", line);
    write_json(line.json, json);
  }
  return 0;
}

}  // namespace ballast
