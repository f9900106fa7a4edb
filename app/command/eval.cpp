// ballast eval: the held-out loss of a checkpoint or of published weights, and generated texts.
#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/plan/opened_files.hpp"
#include "app/train/checkpointing.hpp"
#include "app/train/evaluation.hpp"
#include "app/train/generation.hpp"
#include "app/train/model_files.hpp"
#include "app/train/pair_reference.hpp"
#include "core/config/deck_notes.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

void warn_of_other_keys(const Session& session, Restored& restored) {
  for (const DeckDifference& d : check_deck(session, restored, true)) {
    if (names_model(d.key, session.config))
      restored.warnings.push_back(
          fmt::format("{}: written by another model than the deck's: {}", restored.path, d.text()));
    if (d.key == "data.validation_share")
      restored.warnings.push_back(fmt::format(
          "{}: other samples were held out, so that it may have been trained on these: {}",
          restored.path, d.text()));
  }
}

}  // namespace

int eval_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Config config = line.config(world);
  Config evaluates = config;
  evaluates.eval.every_steps = 1;  // keys of evaluations are read here
  if (world.rank() == 0) tell_deck_notes({&evaluates, 1});
  Session session(world, config);
  if (const std::string note = precision_note(config, session.parameters.dtype());
      world.rank() == 0 && !note.empty())
    fmt::print(stderr, "note: {}\n", note);
  const std::string& weights = config.model.weights;
  check_all(world, !line.restart.empty() || !weights.empty(),
            "eval needs a checkpoint (-r CHECKPOINT or -r latest) or model.weights in the deck");
  check_all(world, !session.sampler.validation().empty(),
            "eval: the validation split is empty; set data.validation_share (data.needle_held_out "
            "for needle data) above 0");
  together(world, [&] { refuse_held_out_without_loss(config, *session.dataset, session.sampler); });
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
    warn_of_other_keys(session, restored);
  }
  load_pairs(session);
  refuse_other_reference(session, restored);
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
