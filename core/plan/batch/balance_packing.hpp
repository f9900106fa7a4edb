// Hierarchical Balance Packing, Section 4.2 (Algorithms 2, 5, 6, 7): samples packed by length
// group, so that packs that run at the same time hold the same work and only long samples pay for
// sequence parallelism.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/problem.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/packing.hpp"

namespace ballast {

/// Why `groups` cannot pack for `ranks` ranks.  Lengths ascend strictly, ranks a
/// pack do not descend and divide `ranks`.
std::vector<Problem> problems(std::span<const PackGroup> groups, int ranks);

/// Index of the group that a sample belongs to (Algorithm 5): the first whose length holds it;
/// groups.size() when none does.
std::size_t group_of(std::int64_t tokens, std::span<const PackGroup> groups);

/// Packs of all groups.  Each pack of a group holds at least one of that group's own samples.
struct GroupedPacking {
  Packing packs;
  std::vector<std::uint32_t> group;  ///< of each pack; the longest group's packs come first
};

/// From the longest group down: packs the samples that no longer group has taken, then fills the
/// room left with shorter groups' samples (GreedyFill, Algorithm 6), the longest that fits first.
/// A batch of a group has m = ranks / group.ranks packs; packing places m samples of neighbouring
/// length at a time, one in each of m packs.  So packs come in sets of m that are alike in tokens
/// and attention before any sorting, and a set costs no more to place than a sample.  `alike` =
/// false packs a group's samples by isf instead, as the paper does. O(n) for the radix sort and O(n
/// / m log n) for the rest; about 50 bytes a sample. Errors: problems(groups, ranks); a sample
/// longer than every group.
GroupedPacking hbp_packing(std::span<const std::int64_t> lengths, std::span<const PackGroup> groups,
                           int ranks, bool alike = true, std::uint64_t seed = 0);

}  // namespace ballast
