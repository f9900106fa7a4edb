// The checkpoints of a training run: when they are written, what becomes of one that fails, and how
// long they take.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "app/train/checkpointing.hpp"
#include "io/checkpoint/checkpoint_writer.hpp"

namespace ballast {

class Checkpoints {
 public:
  struct Options {
    std::string folder;
    int keep = 2, max_failures = 3;
    std::int64_t snapshot_bytes = 0;
    bool best = false;  ///< keep the one of the lowest held-out loss
    /// Before anything is written or removed in `folder`.  Collective.  Errors: it is another's.
    std::function<void()> require_folder = [] {};
  };
  /// `say` gets the lines for the log.  Collective.
  Checkpoints(Session& session, ShardedOptimizer& optimizer, Options options,
              const Restored& restored, std::function<void(const std::string&)> say);
  /// Before the optimizer changes the state.
  void release() { writer_.release(); }
  /// After a step.  `due`: the deck wants a checkpoint of `state`; one that failed is tried again
  /// in any case.  Collective.  Errors: max_failures in a row; the folder is another's.
  void after_step(const CheckpointState& state, bool due);
  /// Whether this held-out loss after `step` steps is the lowest so far and the deck keeps the best
  /// checkpoint, so that one is due.
  bool is_best(double loss, std::int64_t step);
  /// Before the run ends: whatever is in flight is finished; with `wanted`, the state is in a file
  /// when this returns.  Collective.  Errors: max_failures in a row.
  void finish(const CheckpointState& state, bool wanted);
  /// Path of the newest sound file that this run wrote or continued, "" for none, and of the newest
  /// one of a step before `step`.
  const std::string& newest() const { return newest_; }
  std::string before(std::int64_t step) const;
  /// Seconds that the longest checkpoint took from begin to end; an estimate until one is measured.
  double longest_s() const { return longest_s_; }

 private:
  /// What of the best checkpoint is still there.  Collective.
  void restore_best(const CheckpointState& state);
  void start(const CheckpointState& state);
  void settle(const CheckpointOutcome& outcome);
  Session& session_;
  ShardedOptimizer& optimizer_;
  Options options_;
  std::function<void(const std::string&)> say_;
  CheckpointWriter writer_;
  std::string run_, parent_, newest_;
  std::vector<double> contents_;        ///< fingerprint of the training data's contents
  std::vector<double> judged_by_;       ///< what evaluations of this run have in common
  std::optional<BestCheckpoint> best_;  ///< the lowest held-out loss whose file is there or due
  /// What the newest written file says of it, whose own file is there, and what the one on its way
  /// does.
  std::optional<BestCheckpoint> kept_best_, coming_best_;
  std::int64_t saved_step_ = -1;
  int failures_ = 0;
  double longest_s_ = 0;
};

}  // namespace ballast
