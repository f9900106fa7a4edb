// Checkpoints: one parallel HDF5 file under full logical shapes, so that any mesh can read what
// another wrote.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/data/sampler.hpp"
#include "core/model/model_shape.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Everything besides tensors.
struct CheckpointState {
  std::int64_t step = 0;
  SamplerPosition sampler;
  std::int64_t tokens_seen = 0;
  double seconds_trained = 0;
  std::uint64_t seed = 0;
  std::string deck;  ///< effective deck
  std::string git_hash;
  std::map<std::string, std::vector<double>> extra;  ///< e.g. SAB averages
};

/// One flat shard of this rank: elements [begin, end) of the flat buffer whose parameters are
/// `table` in order.  `fields` maps "master", "moment1", "moment2" (or "value") to tensors of end -
/// begin elements, on any device.  An element held by several ranks must be offered by one of them
/// only (begin == end on the others).
struct CheckpointShard {
  const std::vector<Parameter>* table = nullptr;
  std::int64_t begin = 0, end = 0;
  std::map<std::string, Tensor> fields;
};

/// Writes DIR/step_XXXXXXXX.h5: temporary name, checksums over fixed logical ranges, flush, sync,
/// rename; then removes all but the newest `keep` files up to this step (>= 1; files of later
/// steps, left by a run that went back, are not counted and not touched).  Space is reserved first,
/// elements go through MPI-IO.  Collective.  Any failure (full disk included) removes the temporary
/// file, leaves older files alone and throws Error on every rank.  Returns the path.
std::string write_checkpoint(const std::string& dir, const Communicator& world,
                             const CheckpointShard& shard, const CheckpointState& state, int keep);

/// Reads a file into this rank's shard (any sharding; several ranks may read the same elements).
/// `shard.fields` says which fields to read. Collective.  Verifies format version, shapes, dtype
/// and every checksum first, and that the file has no parameter that no rank wants; throws Error
/// naming file and dataset, with the shard untouched.
CheckpointState read_checkpoint(const std::string& path, const Communicator& world,
                                CheckpointShard& shard);

/// Everything besides tensors of a file whose every byte is checked first, as in read_checkpoint.
/// Collective.
CheckpointState verify_checkpoint(const std::string& path, const Communicator& world);

/// Path of the newest checkpoint in DIR that verifies, skipping (and naming in `warnings`) damaged
/// ones; "" when none.  Collective.
std::string latest_checkpoint(const std::string& dir, const Communicator& world,
                              std::vector<std::string>& warnings);

}  // namespace ballast
