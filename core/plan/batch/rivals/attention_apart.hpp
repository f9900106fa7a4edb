// What placing core attention (queries times keys times values) apart from tokens could reach at
// best: every rank has the same number of tokens for all else, and the same attention.
// Source: "Efficient Long-context Language Model Training by Core Attention Disaggregation" (2025).
#pragma once
#include <vector>

#include "core/plan/batch/placement.hpp"

namespace ballast {

struct AttentionApart {
  double even_s = 0;       ///< the step where every transfer hides behind computation
  double transfers_s = 0;  ///< what transfers add where none does
  double moved_share = 0;  ///< of attention, on other ranks than its queries
};

/// The step's samples laid one behind another and cut at equal tokens, no matter where documents
/// end; attention of documents that several ranks hold moves, and of whole ones, the longest first,
/// as much as their rank has above the mean.  Queries, keys, values and results of what moves are
/// priced as an exchange of heads prices them, spread evenly over ranks.  A bound, not a plan:
/// blocks of attention are as small as it takes, memory does not count.
AttentionApart attention_apart(const std::vector<SampleLength>& samples,
                               const PlacementOptions& options, const PlacementCosts& costs);

}  // namespace ballast
