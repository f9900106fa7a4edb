// LocalBatch of one rank: its tokens, targets and positions of a micro-batch under a layout, read
// from the dataset.
#pragma once
#include <utility>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/context/sequence_layout.hpp"
#include "io/data/dataset.hpp"
#include "kernels/model/stage_model.hpp"

namespace ballast {

/// Reads `pieces` alone: ranges of the packed axis, ascending (SequenceLayout::pieces).  Padding
/// has token 0, no target and segment -1.  Tensors are on `device`.
LocalBatch read_local_batch(const Dataset& dataset, const MicroBatch& micro_batch,
                            const std::vector<std::pair<std::int64_t, std::int64_t>>& pieces,
                            Device& device);

/// Fills batch.dropout_keys, so that a token drops the same adapter inputs on every mesh, and
/// others at another step.
void name_tokens(LocalBatch& batch, const MicroBatch& micro_batch, std::int64_t step,
                 Device& device);
/// [T] weight of each local token's loss from that of its segment (LocalBatch::segment), in `type`
/// on `device`; undefined for no weights (all 1).
Tensor token_weights(const std::vector<double>& of_segment,
                     const std::vector<std::int32_t>& segment, DType type, Device& device);

}  // namespace ballast
