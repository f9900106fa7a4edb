// The file of dpo.reference: log probabilities of every pair under the model that training begins
// with, and the marks of the data and the weights that they were computed from.
#pragma once
#include <vector>

#include "app/train/session.hpp"
#include "kernels/ops/preference.hpp"

namespace ballast {

/// [sample] of the file of dpo.reference; empty for dpo.reference_free.  Collective.  Errors, on
/// every rank: no such file, damaged, of other data (tokens and masks, so another template too) or
/// other weights.
std::vector<PairLogProbabilities> read_pair_reference(const Session& session);

/// Fills session.pairs, with that reference, where the deck trains on pairs.  Collective; errors as
/// above.
void load_pairs(Session& session);

/// Writes the file, under another name first.  Collective; rank 0 writes.  Errors, on every rank:
/// cannot be written.
void write_pair_reference(const Session& session, const std::vector<PairLogProbabilities>& pairs);

}  // namespace ballast
