// Between a session and its checkpoints: which shard of what goes to the file, and how a run is put back.
#pragma once
#include <string>
#include <vector>

#include "app/session.hpp"
#include "io/checkpoint.hpp"
#include "parallel/zero.hpp"

namespace ballast {

struct Restored {
  std::string path;  ///< "" when there was nothing to restore
  CheckpointState state;
  std::vector<std::string> warnings;
};

/// Loads `what` (a file, or "latest" for the newest sound checkpoint of `run_folder`; none there is not an error) into parameters and optimizer.
/// Collective.  Errors: damaged or foreign file, another seed than the deck's.
Restored restore(Session& session, ShardedOptimizer& optimizer, const std::string& what, const std::string& run_folder);

/// Writes the state after `state.step` steps.  Collective; returns the path.
std::string save(Session& session, ShardedOptimizer& optimizer, CheckpointState state, const std::string& folder);

}  // namespace ballast
