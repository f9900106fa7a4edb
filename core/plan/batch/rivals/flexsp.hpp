// Placement as flexible sequence parallelism does it: a step in a few micro-batches, each with the
// sequence-parallel groups of different size that a solver finds for its lengths.
// Source: "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism"
// (ASPLOS 2025).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/plan/batch/placement.hpp"

namespace ballast {

/// The fewest micro-batches that memory allows and up to two more are tried; the step's samples,
/// sorted by length, are cut into them at equal tokens.  In each, lengths count as one of at most
/// 16 buckets; numbers of groups of 1, 2, 4, 8, ... ranks start from groups of one size and change
/// by cutting a group in half or joining two, as long as the longest group's predicted time falls;
/// for given groups every sample, the longest first, goes where it ends first and memory lasts.  A
/// search in place of the source's integer program: test_flexsp holds it to what trying every
/// choice of groups finds.  Groups wait only for the ranks that they take over, not for the
/// micro-batch's end.
/// Errors: a sample that no group of a power of two holds.
Placement flexsp_placement(const std::vector<SampleLength>& samples,
                           const PlacementOptions& options, const PlacementCosts& costs);

/// Upper ends, ascending, of at most `count` buckets of lengths (in any order): the ones with the
/// fewest tokens between a length and its bucket's end.
std::vector<std::int64_t> length_buckets(std::span<const std::int64_t> lengths, int count);

/// Groups for the samples of one micro-batch: groups[g] of splits[s.of[g]] holds lengths[i] with
/// s.group[i] = g.
struct GroupChoice {
  std::vector<int> of;          ///< [group] place in splits
  std::vector<int> group;       ///< [sample]
  std::vector<double> group_s;  ///< [group] predicted
  double longest_s = 0;         ///< infinite where samples find no room
};

/// The best groups for lengths, which descend.  counts[s] groups of splits[s] are given to
/// `assign_groups`; `choose_groups` searches over counts with no more than options.ranks ranks.
GroupChoice assign_groups(std::span<const std::int64_t> lengths, const std::vector<int>& counts,
                          const std::vector<PlacementSplit>& splits,
                          const PlacementOptions& options, const PlacementCosts& costs);
GroupChoice choose_groups(std::span<const std::int64_t> lengths,
                          const std::vector<PlacementSplit>& splits,
                          const PlacementOptions& options, const PlacementCosts& costs);

}  // namespace ballast
