#include "app/train/checkpoints.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <random>
#include <thread>
#include <utility>

#include "io/checkpoint/checkpoint_folder.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// Bytes a second of a storage that nobody has measured yet: what one shared disk does.
constexpr double kAssumedRate = 3e8;

/// An identifier that no other process has, the same on all ranks.
std::string new_run(const Communicator& world) {
  std::random_device random;
  return world.broadcast(fmt::format("{:08x}{:08x}", random(), random()), 0);
}

/// What held-out losses depend on beside the model: those of two runs compare where it is equal.
std::vector<double> what_judges(const Session& session, std::vector<double> contents) {
  const Config& config = session.config;
  for (const double half : halves(session.dataset->fingerprint())) contents.push_back(half);
  contents.insert(contents.end(),
                  {config.data.validation_share, static_cast<double>(config.eval.samples),
                   static_cast<double>(config.loss.kind)});
  if (trains_pairs(config))
    contents.insert(contents.end(), {config.dpo.beta, config.dpo.label_smoothing,
                                     config.dpo.reference_free ? 1.0 : 0.0});
  if (session.reference_model != 0)
    for (const double half : halves(session.reference_model)) contents.push_back(half);
  return contents;
}

}  // namespace

Checkpoints::Checkpoints(Session& session, ShardedOptimizer& optimizer, Options options,
                         const Restored& restored, std::function<void(const std::string&)> say)
    : session_(session),
      optimizer_(optimizer),
      options_(std::move(options)),
      say_(std::move(say)),
      writer_(session.mesh.world, options_.folder, options_.keep, options_.snapshot_bytes),
      run_(new_run(session.mesh.world)),
      newest_(restored.path),
      contents_(contents_of(session)),
      judged_by_(what_judges(session, contents_)) {
  if (!restored.path.empty()) {
    parent_ = fmt::format("{} (run {})", restored.path,
                          restored.state.run.empty() ? "unknown" : restored.state.run);
    saved_step_ = restored.state.step;
    restore_best(restored.state);
  }
  if (session.config.checkpoint.every_steps > 0 || options_.best)
    prepare_saves(session_, optimizer_, writer_);
  const AdamWState& state = optimizer_.state();
  const auto bytes =
      static_cast<double>(state.master.bytes() + state.moment1.bytes() + state.moment2.bytes());
  // Under ZeRO 0 every rank holds all, and one writes it.
  const bool writes = session_.config.optimizer.zero > 0 || session_.mesh.replica.rank() == 0;
  longest_s_ = session_.mesh.world.all_reduce(writes ? bytes : 0.0) / kAssumedRate;
}

void Checkpoints::restore_best(const CheckpointState& state) {
  best_ = best_checkpoint(state);
  if (!best_) return;
  const auto judged_by = state.extra.find("best_judged_by");
  if (judged_by != state.extra.end() && judged_by->second != judged_by_) {
    best_.reset();
    say_(
        "the best checkpoint of before was found by another loss or other held-out samples; it is "
        "looked for anew");
    return;
  }
  // The file of an older best one goes when a better one comes, so a run that went back may lack
  // it.
  std::int64_t missing = 0;
  if (session_.mesh.world.rank() == 0) {
    const std::string path = options_.folder + "/" + checkpoint_name(best_->step);
    std::error_code ignored;
    // A link leads to another run's file, which may remove it.
    missing = !std::filesystem::is_regular_file(std::filesystem::symlink_status(path, ignored));
    if (missing != 0)
      remove_best(options_.folder);
    else if (const std::string why = link_best(options_.folder, best_->step); !why.empty())
      say_("warning: " + why);
  }
  if (session_.mesh.world.all_reduce(missing) != 0) best_.reset();
  kept_best_ = best_;
}

bool Checkpoints::is_best(double loss, std::int64_t step) {
  if (!options_.best || !(loss < (best_ ? best_->loss : std::numeric_limits<double>::infinity())))
    return false;
  best_ = {loss, step};
  return true;
}

void Checkpoints::after_step(const CheckpointState& state, bool due) {
  if (writer_.in_flight()) options_.require_folder();
  settle(writer_.poll());
  // The attempt that is on its way may be the one that succeeds.
  if (!due && (failures_ == 0 || writer_.in_flight())) return;
  if (writer_.in_flight()) settle(writer_.finish());
  if (due || failures_ > 0) start(state);
}

void Checkpoints::finish(const CheckpointState& state, bool wanted) {
  // What was judged best stays so if only a later try saves it: no evaluation follows.
  const std::optional<BestCheckpoint> judged =
      best_ && best_->step == state.step ? best_ : std::nullopt;
  settle(writer_.finish());
  // Storage that is full or away may be back soon, and after the last attempt all is lost.
  constexpr double kFirstPause = 1, kLongestPause = 8, kMostPauses = 30;
  double pause_s = kFirstPause, left_s = kMostPauses;
  while ((wanted || failures_ > 0) && saved_step_ != state.step) {
    if (judged) best_ = judged;
    start(state);
    settle(writer_.finish());
    if (saved_step_ == state.step) break;
    pause_s = std::min(pause_s, left_s);
    say_(fmt::format("no step follows: the last checkpoint is tried again in {:.0f} s", pause_s));
    std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    left_s -= pause_s;
    pause_s = std::min(2 * pause_s, kLongestPause);
  }
}

void Checkpoints::start(const CheckpointState& state) {
  if (saved_step_ == state.step) return;
  options_.require_folder();
  CheckpointState whole = state;
  whole.run = run_;
  whole.parent = parent_;
  // What an earlier session said beside is not this one's, but for the file that stays as the best
  // and the reference of pairs, from which the model came also where this session has none.
  std::erase_if(whole.extra, [&](const auto& entry) {
    return !entry.first.starts_with("best") &&
           (entry.first != "reference_model" || !trains_pairs(session_.config));
  });
  whole.extra["data_contents"] = contents_;
  if (best_) {
    set_best_checkpoint(whole, *best_);
    whole.extra["best_judged_by"] = judged_by_;
  }
  coming_best_ = best_;
  settle(save(session_, optimizer_, std::move(whole), writer_));
}

void Checkpoints::settle(const CheckpointOutcome& outcome) {
  using Kind = CheckpointOutcome::Kind;
  if (outcome.kind == Kind::none) return;
  if (outcome.kind == Kind::written) {
    failures_ = 0;
    saved_step_ = outcome.step;
    newest_ = outcome.path;
    kept_best_ = coming_best_;
    if (!outcome.warning.empty()) say_("warning: " + outcome.warning);
    if (best_ && best_->step == outcome.step)
      say_(fmt::format("best checkpoint so far, held-out loss {:.6f}: {}", best_->loss,
                       outcome.path));
    const double beside_s = outcome.synchronous ? 0 : outcome.write_s + outcome.check_s;
    longest_s_ = std::max(longest_s_, beside_s + outcome.waited_s);
    const double written = static_cast<double>(outcome.bytes) * 1e-6;
    say_(fmt::format(
        "checkpoint {}  {:.1f} MB written in {:.3f} s ({:.0f} MB/s), read back in "
        "{:.3f} s; training waited {:.3f} s{}",
        outcome.path, written, outcome.write_s, written / std::max(outcome.write_s, 1e-6),
        outcome.check_s, outcome.waited_s,
        outcome.synchronous ? ": more than checkpoint.snapshot_bytes, so it was written at once"
                            : ""));
    return;
  }
  ++failures_;
  // The next evaluation decides anew, against the one whose file is there.
  if (best_ && best_->step == outcome.step) best_ = kept_best_;
  const std::string sound =
      newest_.empty() ? "no sound one exists" : "the newest sound one is " + newest_;
  check_all(session_.mesh.world, failures_ < options_.max_failures,
            fmt::format("checkpoint {} failed, {} in a row (checkpoint.max_failures): {}; {}",
                        outcome.path, failures_, outcome.problem, sound));
  say_(fmt::format("warning: checkpoint {} failed: {}; {}; the next attempt follows the next step",
                   outcome.path, outcome.problem, sound));
}

std::string Checkpoints::before(std::int64_t step) const {
  std::string name;
  if (session_.mesh.world.rank() == 0) {
    try {
      for (std::int64_t s : checkpoint_steps(options_.folder))
        if (s < step && name.empty()) name = options_.folder + "/" + checkpoint_name(s);
    } catch (const Error&) {  // the folder cannot be read: then there is nothing to recommend
    }
  }
  return session_.mesh.world.broadcast(name, 0);
}

}  // namespace ballast
