// Weights into a run and gradients out of it, as safetensors: what a run shares with other programs.
#pragma once
#include <string>

#include "app/session.hpp"
#include "parallel/zero.hpp"

namespace ballast {

/// Reads the folder of model.weights into parameters and master weights; every rank reads its shard alone.  Moments stay as they are.
/// Collective.  Errors, on every rank: missing folder, damaged file, a tensor that does not fit, by name.
void load_weights(Session& session, ShardedOptimizer& optimizer);

/// Writes the reduced gradients of the whole model to one safetensors file, F32, under the parameters' names; rank 0 writes.  Collective;
/// between reduce_gradients() and the next begin_step().  Errors, on every rank: a file that cannot be written.
void dump_gradients(const std::string& file, Session& session, const ShardedOptimizer& optimizer);

}  // namespace ballast
