// Which micro-batches of a list are chunks of one sample.
#pragma once
#include <vector>

#include "core/plan/batch/batch.hpp"

namespace ballast {

/// groups[g]: micro-batches (indices in the data-parallel rank's list) of one sample's dependent
/// chunks, ascending; a standalone micro-batch is a group of one.  Forward runs ascending inside a
/// group, backward descending.
using ChunkGroups = std::vector<std::vector<int>>;

/// Groups of a list, by first appearance.  Error: dependent chunks of a sample that do not follow
/// each other without a gap.
ChunkGroups chunk_groups(const std::vector<MicroBatch>& list);

}  // namespace ballast
