// Deck keys in the terms of kernels: what several commands read alike.
#pragma once
#include "core/deck.hpp"
#include "core/tensor.hpp"
#include "kernels/model.hpp"

namespace ballast {

/// Compute type of a run of the deck where its backend is there (run.backend, run.precision).
DType planned_type(const Deck& deck);
/// Block recompute.
RecomputeOptions recompute_options(const Deck& deck);

}  // namespace ballast
