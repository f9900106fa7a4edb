// Deck keys in the terms of kernels: what several commands read alike.
#pragma once
#include "app/observe/overheads.hpp"
#include "core/base/tensor.hpp"
#include "core/config/deck.hpp"
#include "kernels/model/stage_model.hpp"

namespace ballast {

/// Compute type of a run of the deck where its backend is there (run.backend, run.precision).
DType planned_type(const Deck& deck);
/// Block recompute.
RecomputeOptions recompute_options(const Deck& deck);

/// Which overheads of balance a run has.
Overheads overheads(const Deck& deck);

}  // namespace ballast
