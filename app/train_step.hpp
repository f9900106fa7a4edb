// One training step on this rank, given its Batch: execute the schedule, reduce gradients, update.  Used by `train` and `bench step`.
#pragma once
#include "app/session.hpp"
#include "core/schedule.hpp"
#include "parallel/stage_executor.hpp"
#include "parallel/tied_embedding.hpp"
#include "parallel/zero.hpp"

namespace ballast {

AdamWOptions adamw_options(const Deck& deck);

class TrainStep {
 public:
  /// Collective.
  TrainStep(Session& session, ShardedOptimizer& optimizer)
      : session_(session),
        optimizer_(optimizer),
        tied_(session.mesh, session.parameters, optimizer, static_cast<int>(session.deck.integer("optimizer.zero"))) {}

  struct Gradients {
    double loss = 0;  ///< objective of the global batch
    double norm = 0;  ///< of the whole gradient, before clipping
    MicroBatchLosses losses;  ///< of this rank's micro-batches, before their weight in the objective
  };
  /// The schedule of this rank's pipeline for a batch, all stages.
  Schedule schedule(const Batch& batch) const;
  /// Forward and backward of all micro-batches in the order of schedule(batch), gradients reduced.  Collective.
  Gradients compute(const Batch& batch, const Schedule& schedule);
  /// Clips and updates; `step` counts from 1.  Returns the learning rate.  Collective.
  double update(double norm, std::int64_t step);

 private:
  Session& session_;
  ShardedOptimizer& optimizer_;
  TiedEmbedding tied_;
};

}  // namespace ballast
