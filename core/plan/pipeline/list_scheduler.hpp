// List scheduling of one order of samples under the rules of state_aware_schedule.hpp: what its
// search over orders evaluates many times.
#pragma once
#include <array>
#include <cstddef>
#include <limits>
#include <vector>

#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/schedule_lists.hpp"

namespace ballast {

/// When a stage computes weight gradients.
enum class WeightHalves {
  whole,    ///< as part of backward
  fill,     ///< where nothing else can begin
  patient,  ///< where nothing else can begin before they would be done
  lag,      ///< as with fill, but before the next forward where more of them wait than stages lie
            ///< before this one (as ZB-H1 does)
};

/// What list scheduling prefers where several ops could begin.
struct ListRules {
  bool recompute_first = true;  ///< where a recompute and a forward could both begin
  bool early_recompute = true;  ///< a recompute may take a free slot before its turn, in time
                                ///< that the stage would idle
  WeightHalves weights = WeightHalves::whole;
  bool split() const { return weights != WeightHalves::whole; }
};

/// Seconds of every op that a schedule can have, asked for once.
class OpDurations {
 public:
  OpDurations(const ChunkGroups& groups, int stages, const ScheduleCosts& costs);
  double op(int stage, OpKind kind, int micro_batch) const {
    return at(stage, static_cast<int>(kind), micro_batch);
  }
  /// Until the neighbour has a stage's output, or the gradient of its input; 0 at either end.
  double output_transfer(int stage, int micro_batch) const { return at(stage, 5, micro_batch); }
  double gradient_transfer(int stage, int micro_batch) const { return at(stage, 6, micro_batch); }

 private:
  static constexpr int kKinds = 7;  ///< those that compute, then both transfers
  double at(int stage, int kind, int micro_batch) const {
    return seconds_[static_cast<std::size_t>((stage * kKinds + kind) * size_ + micro_batch)];
  }
  int size_ = 0;
  std::vector<double> seconds_;  ///< [stage, kind, micro-batch]
};

/// Builds schedules of one list of groups; every call may give another order of them.
class ListScheduler {
 public:
  using Order = std::vector<std::size_t>;  ///< places in `groups`, each once

  /// `groups` must live as long. Errors: those of state_aware_schedule.
  ListScheduler(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs);

  /// When the last op ends; infinity as soon as it is clear that this would be after `limit_s`.
  double end_s(const Order& order, const ListRules& rules, double limit_s);
  Schedule schedule(const Order& order, const ListRules& rules);
  /// Seconds that no schedule can beat: some stage waits for its first input, works without a
  /// pause, and its last gradient goes home.
  double least_s(bool split) const;
  const OpDurations& durations() const { return durations_; }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct State {
    double free = 0;  ///< when it is
    /// Seconds at least until the end: of the ops that it still has to do, and of those that its
    /// last gradient waits for, here and at the stages before.
    double work = 0, way_home = 0;
    /// Places in the orders; weight halves come in the order of their input halves.
    std::size_t next_forward = 0, next_backward = 0, next_weight = 0;
    int live = 0;  ///< micro-batches between forward (or recompute) and the end of their backward
    std::size_t halves() const { return next_backward - next_weight; }
  };
  /// Of a micro-batch on a stage.
  struct Progress {
    double output_at = kNever;    ///< when its output is at the next stage
    double gradient_at = kNever;  ///< when its gradient is at the stage before
    bool present = false;         ///< its activations are here
  };
  /// What a stage does next; when, stands in begins_.
  struct Choice {
    OpKind kind = OpKind::forward;
    const ScheduleItem* item = nullptr;  ///< in one of the orders
  };

  void reset(const Order& order, const ListRules& rules);
  double run(double limit_s, std::vector<StageList>* lists);
  void choose(int stage);
  double take(int stage, const Choice& choice);
  void choose_again(int stage, OpKind taken);
  double least_end(int stage, OpKind taken) const;
  int first_to_begin() const;
  void lay_out_work();
  bool may_send(int stage, Payload payload) const;
  bool fits(int stage, int reserved) const;
  const ScheduleItem* early_recompute(int stage) const;
  bool discarded(const ScheduleItem& i) const { return i.chunk < i.chunks - k_; }
  const State& state(int stage) const { return state_[static_cast<std::size_t>(stage)]; }
  const Progress& progress(int stage, int micro_batch) const {
    return progress_[static_cast<std::size_t>(stage * size_ + micro_batch)];
  }

  const ChunkGroups& groups_;
  int stages_, k_, size_ = 0;
  OpDurations durations_;
  ListRules rules_;
  std::vector<ScheduleItem> forward_, backward_;
  std::vector<State> state_;
  std::vector<Progress> progress_;  ///< [stage, micro-batch]
  std::vector<Choice> choices_;
  static constexpr int kEight = 8;
  /// [stage] Choice::begin, and [eight stages] the earliest of them, both filled up to whole
  /// eights.
  std::vector<double> begins_, earliest_;
};

}  // namespace ballast
