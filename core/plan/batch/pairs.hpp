// Pairs of a chosen and a rejected answer in a batch: batching places a pair as one sample, and its
// two answers then stand side by side in one micro-batch, as documents of their own.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/batch/batch.hpp"

namespace ballast {

/// Replaces the segment of each pair among `samples` by two, the chosen answer and the rejected one
/// behind it, neither of which attends to the other.  Errors: a pair that was cut, with `fits`, the
/// most tokens of a micro-batch.
void separate_pairs(std::span<Batch> batches, const std::vector<SampleLength>& samples,
                    std::int64_t fits);

/// Lengths of what of a sample attends to itself alone: both answers of a pair, else the whole.
std::vector<std::int64_t> document_lengths(const SampleLength& sample);

}  // namespace ballast
