// One training step on this rank, given its Batch: execute the schedule, reduce gradients, update.
// Used by `train` and `bench step`.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "app/plan/pipeline_simulation.hpp"
#include "app/train/session.hpp"
#include "core/plan/pipeline/schedule.hpp"
#include "parallel/optimizer/zero.hpp"
#include "parallel/pipeline/stage_executor.hpp"
#include "parallel/pipeline/tied_embedding.hpp"

namespace ballast {

AdamWOptions adamw_options(const Config& config);

class TrainStep {
 public:
  /// Collective.
  TrainStep(Session& session, ShardedOptimizer& optimizer);

  struct Gradients {
    double loss = 0;  ///< objective of the global batch
    double norm = 0;  ///< of the whole gradient, before clipping
    MicroBatchLosses
        losses;  ///< of this rank's micro-batches, before their weight in the objective
  };
  /// The schedule of this rank's pipeline for a batch, all stages; state-aware ones are built by
  /// the times of the deck's profile table where it names one.  Collective.
  Schedule schedule(const Batch& batch) const;
  /// Times of the deck's profile table; none where it names none, or one that lacks what schedules
  /// need.
  const std::optional<StageTimes>& times() const { return times_; }
  /// What the table's checks said.
  const std::vector<std::string>& table_notes() const { return table_notes_; }
  /// Forward and backward of all micro-batches in the order of schedule(batch), gradients reduced.
  /// Collective.
  Gradients compute(const Batch& batch, const Schedule& schedule);
  /// Clips and updates; `step` counts from 1.  Returns the learning rate.  Collective.
  double update(double norm, std::int64_t step);

 private:
  Session& session_;
  ShardedOptimizer& optimizer_;
  TiedEmbedding tied_;
  std::optional<StageTimes> times_;
  std::vector<std::string> table_notes_;
};

}  // namespace ballast
