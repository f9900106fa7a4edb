// The file of dpo.reference (app/plan/reference_file.hpp) on all ranks of a run.
#pragma once
#include <vector>

#include "app/train/session.hpp"
#include "kernels/ops/preference.hpp"

namespace ballast {

/// [sample] of the file of dpo.reference, whose mark session.reference_model then holds; empty for
/// dpo.reference_free.  Collective.  Errors, on
/// every rank: those of read_reference.
std::vector<PairLogProbabilities> read_pair_reference(Session& session);

/// Fills session.pairs, with that reference, where the deck trains on pairs.  Collective; errors as
/// above.
void load_pairs(Session& session);

/// Writes the file.  Collective; rank 0 writes.  Errors, on every rank: cannot be written.
void write_pair_reference(const Session& session, const std::vector<PairLogProbabilities>& pairs);

}  // namespace ballast
