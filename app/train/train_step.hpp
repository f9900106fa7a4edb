// One training step on this rank, given its plan: execute the schedule, reduce gradients, update.
// Used by `train` and `bench step`.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/train/pair_objective.hpp"
#include "app/train/session.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"
#include "parallel/optimizer/zero.hpp"
#include "parallel/pipeline/stage_executor.hpp"
#include "parallel/pipeline/tied_embedding.hpp"

namespace ballast {

class TrainStep {
 public:
  /// Collective.
  TrainStep(Session& session, ShardedOptimizer& optimizer);

  struct Gradients {
    double loss = 0;                ///< objective of the global batch
    double norm = 0;                ///< of the whole gradient, before clipping
    std::optional<PairSums> pairs;  ///< means over the global batch's pairs (loss.kind = "dpo")
    MicroBatchLosses
        losses;  ///< of this rank's micro-batches, before their weight in the objective
  };
  /// What plans of the deck are made and timed by; null where it names a profile table that lacks
  /// what schedules need.
  const Costs* costs() const { return costs_.get(); }
  /// Whether they come from the deck's profile table, so that steps are predicted.
  bool predicts() const { return predicts_; }
  /// What the table's checks said.
  const std::vector<std::string>& table_notes() const { return table_notes_; }
  /// Executes a step's plan but for the update: forward and backward of this rank's micro-batches
  /// in the order of its schedule, gradients reduced.  Collective.
  Gradients compute(const StepPlan& plan);
  /// Clips and updates; `step` counts from 1.  Returns the learning rate.  The update may go on
  /// beside the next step's forward (ShardedOptimizer::apply).  Collective.
  double update(double norm, std::int64_t step);

 private:
  Session& session_;
  ShardedOptimizer& optimizer_;
  TiedEmbedding tied_;
  std::shared_ptr<const Costs> costs_;
  bool predicts_ = false;
  double forward_tokens_ = 0;  ///< of this rank's latest first micro-batch
  std::vector<std::string> table_notes_;
};

}  // namespace ballast
