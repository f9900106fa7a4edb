// LocalBatch of one rank: its tokens, targets and positions of a micro-batch under a layout, read from the dataset.
#pragma once
#include "core/batch.hpp"
#include "core/sequence_layout.hpp"
#include "io/dataset.hpp"
#include "kernels/model.hpp"

namespace ballast {

/// Padding has token 0 and no target.  Reads only this rank's pieces.  Tensors are on `device`.
LocalBatch read_local_batch(const Dataset& dataset, const MicroBatch& micro_batch, const SequenceLayout& layout, int cp_rank, Device& device);

}  // namespace ballast
