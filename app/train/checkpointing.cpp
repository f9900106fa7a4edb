#include "app/train/checkpointing.hpp"

#include <set>

#include "ballast_version.hpp"
#include "io/checkpoint/checkpoint_folder.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// This rank's part of the trainable parameters.  Replicated state (ZeRO 0) is written by one rank
/// and read by all.
CheckpointShard shard_of(Session& session, ShardedOptimizer& optimizer, bool writing) {
  CheckpointShard shard;
  shard.table = &session.parameters.trainable_table();
  const bool replicated = session.config.optimizer.zero == 0;
  if (!writing || !replicated || session.mesh.replica.rank() == 0) shard.runs = optimizer.runs();
  AdamWState& state = optimizer.state();
  if (optimizer.muon_elements() > 0) shard.field_begin["moment2"] = optimizer.muon_elements();
  shard.fields = {{"master", state.master}, {"moment1", state.moment1}, {"moment2", state.moment2}};
  return shard;
}

/// Numbers of a checkpoint or a deck, of which the third and fourth are the batch's tokens and
/// samples: without the tokens where samples decide.
std::vector<double> deciding(std::vector<double> numbers) {
  if (numbers.size() > 3 && numbers[3] > 0) numbers[2] = 0;
  return numbers;
}

/// What of a curriculum decides the first epoch's order of samples.
std::vector<double> numbers(const Curriculum& c) {
  if (c.steps == 0) return {0};
  return {static_cast<double>(c.steps), static_cast<double>(c.max_tokens),
          static_cast<double>(c.global_tokens), static_cast<double>(c.global_samples)};
}

bool is_model_key(const std::string& key) {
  static const std::set<std::string> kFree = {"model.preset", "model.weights", "model.initial_std",
                                              "model.head_chunk_tokens"};
  return key.starts_with("model.") && !kFree.contains(key);
}

/// Behind the error of a checkpoint whose parameters are not this run's: "", where the models are
/// alike or the checkpoint's deck cannot be read.
std::string model_differences(const std::string& path, const CheckpointState& state,
                              const std::string& deck) {
  std::vector<std::string> lines;
  try {
    for (const DeckDifference& d : deck_differences(state.deck, deck, path))
      if ((is_model_key(d.key) || d.key.starts_with("lora.")) && !d.before.empty() &&
          !d.now.empty())
        lines.push_back(
            fmt::format("{} = {} in the checkpoint, {} in the deck", d.key, d.before, d.now));
  } catch (const Error&) {
    return "";
  }
  if (lines.empty()) return "";
  return fmt::format("; {}: state the same blocks model and lora", fmt::join(lines, "; "));
}

}  // namespace

std::vector<double> halves(std::uint64_t x) {
  return {static_cast<double>(x >> 32), static_cast<double>(x & 0xffffffffu)};
}

std::uint64_t whole(const std::map<std::string, std::vector<double>>& extra,
                    const std::string& name) {
  const auto found = extra.find(name);
  if (found == extra.end() || found->second.size() != 2) return 0;
  return (static_cast<std::uint64_t>(found->second[0]) << 32) +
         static_cast<std::uint64_t>(found->second[1]);
}

bool names_model(const std::string& key, const Config& config) {
  if (is_model_key(key)) return true;
  if (config.lora.rank == 0) return false;
  // Without a folder the base that adapters stand beside follows from it (and the seed, which
  // restore compares).
  return key == "lora.alpha" || (key == "model.initial_std" && config.model.weights.empty());
}

Restored restore(Session& session, ShardedOptimizer& optimizer, const std::string& what,
                 const std::string& run_folder, bool for_training) {
  Restored restored;
  const Communicator& world = session.mesh.world;
  CheckpointShard shard = shard_of(session, optimizer, false);
  shard.widens = !for_training;
  const std::string folder = run_folder + "/checkpoints";
  const MisfitNote note = [&](const std::string& path, const CheckpointState& state) {
    return model_differences(path, state, session.config.effective_deck());
  };
  if (what == "latest") {
    restored.path =
        read_latest(folder, world, shard, restored.state, restored.warnings, for_training, note);
    if (restored.path.empty()) return restored;
  } else {
    restored.path = what;
    if (what == "best") {
      together(world, [&] {
        if (world.rank() == 0) restored.path = best_path(folder);
      });
      restored.path = world.broadcast(restored.path, 0);
    }
    restored.state = read_checkpoint(restored.path, world, shard, note);
  }
  optimizer.values_from_master();
  const Config& config = session.config;
  check_all(
      world,
      config.lora.rank == 0 || !config.model.weights.empty() ||
          restored.state.seed == config.run.seed,
      fmt::format("{}: its adapters were trained beside the initial weights of run.seed = {}, "
                  "the deck has {}: use the same seed",
                  restored.path, restored.state.seed, config.run.seed));
  if (session.tuning) {
    const auto averages = restored.state.extra.find("budget_averages");
    if (averages != restored.state.extra.end())
      together(world, [&] { session.tuning->averages().restore(averages->second); });
    else
      restored.warnings.push_back(
          fmt::format("{}: holds no averages of budgets; they begin anew", restored.path));
  }
  session.tokens_mark = whole(restored.state.extra, "tokens_mark");
  const auto base = restored.state.extra.find("base_fingerprint");
  check_all(
      world, base == restored.state.extra.end() || base->second == halves(session.base_fingerprint),
      fmt::format(
          "{}: its adapters were trained beside other weights than those of model.weights = \"{}\"",
          restored.path, session.config.model.weights));
  return restored;
}

namespace {

/// Where a run stands inside a window, and what the window was made by.
std::vector<double> numbers(const SamplerPosition& position, const WindowOptions& window) {
  return {static_cast<double>(position.window_step), static_cast<double>(window.steps),
          static_cast<double>(window.global_tokens), static_cast<double>(window.global_samples),
          static_cast<double>(window.rule)};
}

}  // namespace

void refuse_other_reference(const Session& session, const Restored& restored) {
  const auto found = restored.state.extra.find("reference_model");
  check_all(session.mesh.world,
            session.reference_model == 0 || found == restored.state.extra.end() ||
                found->second == halves(session.reference_model),
            fmt::format("{}: trained against another reference than that of dpo.reference = "
                        "\"{}\"; name the one it began with, or export it and begin a run there",
                        restored.path, session.config.dpo.reference));
}

namespace {

/// A run that stopped inside a window goes on inside the same one.
void restore_window(Session& session, Restored& restored) {
  const auto found = restored.state.extra.find("sampler_window");
  if (found == restored.state.extra.end()) return;
  const std::vector<double> before = found->second;
  SamplerPosition& at = restored.state.sampler;
  check_all(session.mesh.world, before.size() == 5 && before[0] >= 1 && before[0] < before[1],
            fmt::format("{}: a place in a window that no run has: {}", restored.path,
                        fmt::join(before, ", ")));
  at.window_step = static_cast<std::int64_t>(before[0]);
  at.window = static_cast<std::int64_t>(before[1]);
  check_all(session.mesh.world, deciding(before) == deciding(numbers(at, session.options.window)),
            fmt::format("{}: written after step {} of a window of {} steps (batching.global_tokens "
                        "= {}, global_samples = {}); keep these, batching.window and window_rule "
                        "until that window has ended",
                        restored.path, before[0], before[1], before[2], before[3]));
  restored.state.extra.erase(found);
}

/// Data that has fewer training samples than before may end before the place where the run stands.
void skip_lost_samples(const Session& session, Restored& restored) {
  SamplerPosition& at = restored.state.sampler;
  const std::int64_t samples = session.sampler.training_samples();
  if (at.index < samples) return;
  restored.warnings.push_back(fmt::format(
      "{}: stands at sample {} of epoch {}, of which the data has {} for training now; the run "
      "goes on with the next epoch",
      restored.path, at.index, at.epoch, samples));
  at = SamplerPosition{.epoch = at.epoch + 1};
}

}  // namespace

std::vector<double> contents_of(const Session& session) {
  std::string print = "0";
  together(session.mesh.world, [&] {
    if (session.mesh.world.rank() == 0) print = fmt::to_string(sampled_contents(*session.dataset));
  });
  return halves(std::stoull(session.mesh.world.broadcast(print, 0)));
}

std::vector<DeckDifference> check_deck(const Session& session, const Restored& restored,
                                       bool any_model) {
  std::vector<DeckDifference> changes;
  std::vector<std::string> refused;
  const bool with_reference = trains_pairs(session.config) && !session.config.dpo.reference_free;
  together(session.mesh.world, [&] {
    for (const DeckDifference& d :
         deck_differences(restored.state.deck, session.config.effective_deck(), restored.path)) {
      if (d.before.empty() || d.now.empty()) continue;  // a key of another version of the program
      changes.push_back(d);
      if (names_model(d.key, session.config)) refused.push_back(d.text());
      require(d.key != "loss.kind" || !with_reference || any_model,
              "{}: trained with loss.kind = {}, so its model is not the one that dpo.reference was "
              "computed with: `ballast export` it, name that folder in model.weights and run "
              "`ballast reference` again, or continue all the same with --force-model",
              restored.path, d.before);
    }
    require(refused.empty() || any_model,
            "{}: written by another model than the deck's ({}); state the same blocks model and "
            "lora, or continue all the same with --force-model",
            restored.path, fmt::join(refused, "; "));
  });
  return changes;
}

void check_sample_order(Session& session, const std::vector<DeckDifference>& changes,
                        Restored& restored) {
  const Communicator& world = session.mesh.world;
  const auto seed = session.config.run.seed;
  check_all(world, restored.state.seed == seed,
            fmt::format("{}: written with run.seed = {}, the deck has {}; the order of samples "
                        "would change: use the same seed",
                        restored.path, restored.state.seed, seed));
  const auto curriculum = restored.state.extra.find("curriculum");
  const std::vector<double> before =
      curriculum == restored.state.extra.end() ? std::vector<double>{0} : curriculum->second;
  check_all(world,
            restored.state.sampler.epoch > 0 ||
                deciding(before) == deciding(numbers(session.options.curriculum)),
            fmt::format("{}: written under another curriculum (steps, max_tokens, global_tokens, "
                        "global_samples = {}, the deck has {}); the order of samples would "
                        "change in the first epoch: use the same block curriculum and batch size",
                        restored.path, fmt::join(before, ", "),
                        fmt::join(numbers(session.options.curriculum), ", ")));
  restore_window(session, restored);
  skip_lost_samples(session, restored);
  for (const DeckDifference& d : changes)
    if (d.key == "data.validation_share" || d.key == "batching.shuffle")
      restored.warnings.push_back(fmt::format(
          "{}: the sampler goes on at its position in another order{}: {}", restored.path,
          d.key == "batching.shuffle" ? "" : ", and may have trained on samples held out now",
          d.text()));
  const auto data = restored.state.extra.find("data_fingerprint");
  if (data != restored.state.extra.end() && data->second != halves(session.dataset->fingerprint()))
    restored.warnings.push_back(fmt::format(
        "{}: written over other data than {}; the sampler goes on at its position in the new order",
        restored.path, session.dataset->description()));
  const auto contents = restored.state.extra.find("data_contents");
  if (contents != restored.state.extra.end() && contents->second != contents_of(session))
    restored.warnings.push_back(
        fmt::format("{}: the samples of {} hold other tokens than when it was written",
                    restored.path, session.dataset->description()));
}

void leave_overtaken(const Session& session, const std::string& run_folder, Restored& restored) {
  const Communicator& world = session.mesh.world;
  const std::string folder = run_folder + "/checkpoints";
  TakenUp taken;
  together(world, [&] {
    // So that -r latest, as a job that is queued again gives, finds what this run began with.
    if (world.rank() == 0) taken = take_up(folder, restored.path, restored.state.step);
  });
  const std::string unlinked = world.broadcast(taken.unlinked, 0);
  if (!unlinked.empty())
    restored.warnings.push_back(
        fmt::format("{}: until this run has written a checkpoint, -r latest "
                    "would not find this one; give -r {} again",
                    unlinked, restored.path));
  const std::string left = world.broadcast(taken.left, 0);
  if (!left.empty())
    restored.warnings.push_back(
        fmt::format("the checkpoints of the branch that is left are now in {}", left));
}

void prepare_saves(Session& session, ShardedOptimizer& optimizer, CheckpointWriter& writer) {
  writer.prepare(shard_of(session, optimizer, true));
}

CheckpointOutcome save(Session& session, ShardedOptimizer& optimizer, CheckpointState state,
                       CheckpointWriter& writer) {
  Scope scope(&session.recorder, EventKind::checkpoint);
  state.seed = session.config.run.seed;
  state.deck = session.config.effective_deck();
  state.git_hash = git_hash();
  if (session.tuning) state.extra["budget_averages"] = session.tuning->averages().values();
  state.extra["curriculum"] = numbers(session.options.curriculum);
  if (state.sampler.window_step > 0)
    state.extra["sampler_window"] = numbers(state.sampler, session.options.window);
  state.sampler.window_step = state.sampler.window = 0;  // stand there alone
  state.extra["data_fingerprint"] = halves(session.dataset->fingerprint());
  if (session.parameters.frozen_numel() > 0)
    state.extra["base_fingerprint"] = halves(session.base_fingerprint);
  if (session.tokens_mark != 0) state.extra["tokens_mark"] = halves(session.tokens_mark);
  if (session.reference_model != 0)
    state.extra["reference_model"] = halves(session.reference_model);
  return writer.begin(shard_of(session, optimizer, true), state);
}

}  // namespace ballast
