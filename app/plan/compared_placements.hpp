// Placements that `ballast pack --compare` sets side by side: one deck's samples, ranks, memory and
// costs, another method each.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/plan/batch/placement.hpp"
#include "core/plan/batch/rivals/attention_apart.hpp"

namespace ballast {

struct ComparedPlacement {
  std::string name;    ///< of its row
  std::string source;  ///< whose idea, and what of it was chosen for the deck
  Config config;       ///< the deck's, with the method; mesh and packs as the method wants them
  /// In place of the config's method, on its row of data-parallel ranks; empty: plan_batch.
  std::function<Placement(const std::vector<SampleLength>&, const PlacementOptions&,
                          const PlacementCosts&)>
      place;
  bool apart = false;  ///< a bound, attention_apart, in place of a plan
  /// Whether `train` has no such method.
  bool only_planned() const { return place || apart; }
};

/// What trains first: balanced, packed on the best fixed split, hbp as Algorithm 2 prints it, hbp
/// as commit 909e272 trained it with the deck's groups and with those that `ballast plan` selects,
/// and longalign; then flexsp-like, wlb-llm-like, megatron-dynamic-cp-like and attention apart,
/// which are planned alone.  All get the deck's dp x sp x cp ranks, and no rank more tokens of a
/// micro-batch than batching.micro_batch_tokens.  Splits of a whole run are the ones that take
/// least time over the first steps.  What cannot be planned for this deck is left out, with a note.
std::vector<ComparedPlacement> compared_placements(const Config& config,
                                                   std::vector<std::string>& notes);

}  // namespace ballast
