#include "app/evaluate.hpp"

#include <algorithm>

#include "app/command_line.hpp"
#include "app/json_twin.hpp"
#include "app/model_files.hpp"
#include "app/restore.hpp"

namespace ballast {

Evaluation evaluate(Session& session, std::int64_t samples) {
  Scope scope(&session.recorder, EventKind::validation);
  const bool was_enabled = session.recorder.enabled;
  session.recorder.enabled = false;  // one event for the whole pass: its micro-batches are not those of a training step
  std::vector<std::int64_t> chosen = session.sampler.validation();
  if (samples > 0 && static_cast<std::int64_t>(chosen.size()) > samples) chosen.resize(samples);
  const Batch batch = session.plan(-1, chosen);
  double loss = 0;
  for (const MicroBatch& micro_batch : batch.micro_batches.at(session.mesh.at.dp)) {
    MicroBatchWork work = session.prepare(micro_batch, 0);
    loss += session.model.forward(work.batch, Tensor(), *work.attention, nullptr).loss_sum();
  }
  session.recorder.enabled = was_enabled;
  Evaluation result;
  result.loss_tokens = batch.loss_tokens();
  result.samples = batch.samples();
  loss = session.mesh.replica.all_reduce(loss);
  result.loss = result.loss_tokens > 0 ? loss / static_cast<double>(result.loss_tokens) : 0;
  return result;
}

int eval_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const Deck deck = line.deck(world);
  Session session(world, deck);
  const std::string& weights = deck.text("model.weights");
  check_all(world, !line.restart.empty() || !weights.empty(), "eval needs a checkpoint (-r CHECKPOINT or -r latest) or model.weights in the deck");
  check_all(world, !session.sampler.validation().empty(), "eval: the validation split is empty; set data.validation_share above 0");
  ShardedOptimizer optimizer(session.parameters, session.mesh.replica, static_cast<int>(deck.integer("optimizer.zero")), {}, nullptr);
  Restored restored;
  if (line.restart.empty()) {
    load_weights(session, optimizer);
    restored.path = weights;
  } else {
    restored = restore(session, optimizer, line.restart, line.output_folder(deck));
    check_all(world, !restored.path.empty(), fmt::format("eval: no sound checkpoint in {}", line.output_folder(deck)));
  }
  const Evaluation result = evaluate(session, deck.integer("eval.samples"));
  if (world.rank() == 0) {
    fmt::print("checkpoint={} step={} validation_loss={:.6f} loss_tokens={} samples={}\n", restored.path, restored.state.step, result.loss, result.loss_tokens, result.samples);
    write_json(line.json, {{"checkpoint", restored.path}, {"step", restored.state.step}, {"validation_loss", result.loss}, {"loss_tokens", result.loss_tokens}, {"samples", result.samples}});
  }
  return 0;
}

}  // namespace ballast
