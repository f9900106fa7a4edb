// Weights into a run and gradients out of it, as safetensors: what a run shares with other
// programs.
#pragma once
#include <string>

#include "app/train/session.hpp"
#include "parallel/optimizer/zero.hpp"

namespace ballast {

/// With adapters: reads the frozen weights from the folder of model.weights, all of them on every
/// rank, and their fingerprint; a run that goes on needs them too.  Nothing to do without adapters
/// or without a folder (the frozen weights are the initial ones).  Collective.  Errors as below.
void load_base(Session& session);

/// Reads the folder of model.weights into parameters and master weights; every rank reads its shard
/// alone.  Moments stay as they are. Nothing to do with adapters, whose base load_base reads.
/// Collective.  Errors, on every rank: missing folder, damaged file, a tensor that does not fit, by
/// name.
void load_weights(Session& session, ShardedOptimizer& optimizer);

/// Writes the reduced gradients of the whole model to one safetensors file, F32, under the
/// parameters' names; rank 0 writes.  Collective; between reduce_gradients() and the next
/// begin_step().  Errors, on every rank: a file that cannot be written.
void dump_gradients(const std::string& file, Session& session, ShardedOptimizer& optimizer);

}  // namespace ballast
