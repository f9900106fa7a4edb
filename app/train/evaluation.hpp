// Held-out loss over the validation split, and the accuracy of its questions (needle task).
#pragma once
#include "app/train/needle_accuracy.hpp"
#include "app/train/position_loss.hpp"
#include "app/train/session.hpp"
#include "app/train/step_planner.hpp"

namespace ballast {

struct Evaluation {
  double loss = 0;  ///< mean token loss over the held-out tokens; of pairs the mean of their losses
  std::optional<PairFigures> pairs;  ///< where samples are pairs
  std::int64_t loss_tokens = 0, samples = 0;
  NeedleAccuracy needle;  ///< without lengths where the data has no questions
  PositionLoss positions;
  StepRow scalars() const;  ///< for the trace: validation_loss and the accuracies
  /// For a JSON twin: validation_loss, loss_tokens, samples and, of needle data, needle_accuracy
  /// and needle; loss_by_position.
  void write(nlohmann::ordered_json& json) const;
};

/// Forward passes over the first `samples` validation samples (0: all), spread over the mesh like a
/// training batch.  Collective.
Evaluation evaluate(Session& session, StepPlanner& planner, std::int64_t samples);

}  // namespace ballast
