// Between a session and its checkpoints: which shard of what goes to the file, and how a run is put
// back.
#pragma once
#include <string>
#include <vector>

#include "app/train/session.hpp"
#include "io/checkpoint/checkpoint_writer.hpp"
#include "io/deck/deck_difference.hpp"
#include "parallel/optimizer/zero.hpp"

namespace ballast {

/// A fingerprint as a checkpoint stores it: numbers that HDF5 attributes hold exactly.
std::vector<double> halves(std::uint64_t x);
/// The number whose halves `extra` holds; 0: none.
std::uint64_t whole(const std::map<std::string, std::vector<double>>& extra,
                    const std::string& name);

struct Restored {
  std::string path;  ///< "" when there was nothing to restore
  CheckpointState state;
  std::vector<std::string> warnings;
};

/// Loads `what` (a file, "best", or "latest" for the newest sound checkpoint of `run_folder`; none
/// there is at all is not an error) into parameters and optimizer.  `for_training`: unsound files
/// are set aside. Collective.  Errors: damaged or foreign file, adapters of another base.
Restored restore(Session& session, ShardedOptimizer& optimizer, const std::string& what,
                 const std::string& run_folder, bool for_training);

/// What training needs beside: the deck takes the samples in the order that the checkpoint's
/// position counts in.  Other data, and `changes` (of check_deck) of what is held out or shuffled,
/// are warnings. Collective.  Errors: another seed, in the first epoch another curriculum.
void check_sample_order(Session& session, const std::vector<DeckDifference>& changes,
                        Restored& restored);

/// Sampled contents of the training data, as rank 0 sees them, in the form that a checkpoint
/// stores. Collective.
std::vector<double> contents_of(const Session& session);

/// The keys that have another value in the deck than in that of the checkpoint. Collective. Errors:
/// block model describes another model, unless `any_model`.
std::vector<DeckDifference> check_deck(const Session& session, const Restored& restored,
                                       bool any_model);

/// After load_pairs.  Collective.  Errors: the reference is of another model than the one that the
/// checkpoint was trained against.
void refuse_other_reference(const Session& session, const Restored& restored);

/// Whether a key of a deck says what a model computes: not what a run begins with, nor how it walks
/// through the head.
bool names_model(const std::string& key, const Config& config);

/// Moves later checkpoints of the run folder, a branch that is left, to another folder: from here
/// on the newest file is of the branch that this run continues.  After all checks, since a run that
/// is refused continues none. Collective.
void leave_overtaken(const Session& session, const std::string& run_folder, Restored& restored);

/// Takes the memory that snapshots of the state need.  Collective.  Errors: there is not enough.
void prepare_saves(Session& session, ShardedOptimizer& optimizer, CheckpointWriter& writer);

/// Hands the state after `state.step` steps to the writer.  Collective.
CheckpointOutcome save(Session& session, ShardedOptimizer& optimizer, CheckpointState state,
                       CheckpointWriter& writer);

}  // namespace ballast
