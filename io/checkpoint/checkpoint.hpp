// Checkpoints: one HDF5 file under full logical shapes, so that any mesh can read what another
// wrote.  checkpoint_writer.hpp writes them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/data/sampler.hpp"
#include "core/model/parameter_buckets.hpp"
#include "core/model/parameter_table.hpp"
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
  std::string run;     ///< identifier of the process that wrote it, unique
  std::string parent;  ///< what that process continued: "FILE (run ID)", or "" for a new start
  std::map<std::string, std::vector<double>> extra;  ///< e.g. SAB averages
  bool operator==(const CheckpointState&) const = default;
};

/// The checkpoint of the lowest held-out loss of a run, as the states of later ones name it.
struct BestCheckpoint {
  double loss = 0;
  std::int64_t step = 0;
};
std::optional<BestCheckpoint> best_checkpoint(const CheckpointState& state);
void set_best_checkpoint(CheckpointState& state, const BestCheckpoint& best);

/// One shard of this rank: elements of the flat buffer whose parameters are `table` in order, back
/// to back.  `fields` maps "master", "moment1", "moment2" (or "value") to tensors that hold the
/// elements of `runs` at the places that these name, on any device.  An element held by several
/// ranks must be offered by one of them only (no runs on the others).
struct CheckpointShard {
  const std::vector<Parameter>* table = nullptr;
  std::vector<ShardRun> runs;  ///< ascending in every member, none of them empty
  std::map<std::string, Tensor> fields;
  /// Fields that the table's first parameters lack, by their first element that has it: the tensor
  /// begins with the shard's first element from there on.  The same on all ranks with this table.
  std::map<std::string, std::int64_t> field_begin;
  bool widens =
      false;  ///< reading: fp32 of the file becomes fp64, for what does not go on training
  bool empty() const { return runs.empty(); }
  std::int64_t first_of(const std::string& field) const {
    const auto found = field_begin.find(field);
    return found == field_begin.end() ? 0 : found->second;
  }
  /// Places of the shard before those of the field's tensor.
  std::int64_t skipped(const std::string& field) const;
  /// Places that a field's tensor must have.
  std::int64_t places_of(const std::string& field) const {
    return empty() ? 0 : std::max<std::int64_t>(0, places() - skipped(field));
  }
  /// Of a field that all elements have.
  std::int64_t places() const { return empty() ? 0 : runs.back().at + runs.back().count(); }
};

/// What a run says of a checkpoint that does not fit its parameters, behind the error: which keys
/// of the deck differ, or "".
using MisfitNote = std::function<std::string(const std::string& path, const CheckpointState&)>;

/// Reads a file into this rank's shard (any sharding; several ranks may read the same elements).
/// `shard.fields` says which fields to read. Collective.  Every element is summed as it is loaded
/// and the sums are compared over all ranks; a file of version 1 is verified first.  Throws Error
/// naming file and dataset, with the shard's contents undefined: another format, an altered byte,
/// other shapes or dtypes, a parameter that no rank wants, an element that is not finite, a second
/// moment below zero.
CheckpointState read_checkpoint(const std::string& path, const Communicator& world,
                                CheckpointShard& shard, const MisfitNote& note = {});

/// Everything besides tensors of a file whose every byte is checked first.  Collective.
CheckpointState verify_checkpoint(const std::string& path, const Communicator& world);

/// Reads the newest checkpoint of DIR that is sound, and returns its path ("" when DIR has none at
/// all).  Others are named in `warnings`.  `set_aside`, for training: damaged ones are renamed to
/// NAME.damaged, so that nothing replaces them, and one that cannot be read, or is of a later
/// format, is an error, since what comes would replace it.  Files that hold another step than their
/// name says are passed over as they are.  Collective.  Errors: DIR cannot be read; it holds
/// checkpoints, but none that is sound, or only those of a branch that was left.
std::string read_latest(const std::string& dir, const Communicator& world, CheckpointShard& shard,
                        CheckpointState& state, std::vector<std::string>& warnings, bool set_aside,
                        const MisfitNote& note = {});

}  // namespace ballast
