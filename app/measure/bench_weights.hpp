// Weights for benchmarks that run a deck's model.
#pragma once
#include <string>

#include "app/train/session.hpp"

namespace ballast {

/// Fills the model: from a checkpoint, or where `checkpoint` is empty from model.weights; without
/// either it keeps its initial values.  Collective.
void take_weights(Session& session, const std::string& checkpoint);

}  // namespace ballast
