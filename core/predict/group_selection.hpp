// Hierarchical Groups Auto-Selection (HBP Section 4.1, Algorithms 1, 3 and 4): packing groups and
// their settings from measured or stated times and memory.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"

namespace ballast {

/// What a pack costs.  `layers`: those recomputed in backward.
struct PackCosts {
  std::shared_ptr<const Costs> costs;  ///< that a whole plan is timed by
  /// Seconds of forward and backward of a pack that `ranks` ranks share.
  std::function<double(const MicroBatch& pack, int ranks, int layers)> seconds;
  /// Peak bytes of a rank that runs full packs of all `groups` in a step, one after the other. More
  /// than the most of each alone: the short pack's activations stand beside buffers that the long
  /// one made as large as they are.
  std::function<double(std::span<const PackGroup> groups)> bytes;
  /// Peak bytes of a rank over such steps of a run.  Samples' packs are not full, and buffers grow
  /// with the order in which they come: up to a tenth more than full packs take where the model is
  /// small.
  std::function<double(const std::vector<StepPlan>& steps, std::span<const PackGroup> groups)>
      step_bytes;
};

struct GroupSearch {
  std::vector<std::int64_t>
      lengths;  ///< pack lengths to try, ascending; the last must hold the longest sample
  std::vector<int> degrees;  ///< ranks a pack to try, ascending, divisors of `ranks`
  int layers = 1;            ///< of the model
  double memory_bytes = 0;   ///< of a rank, in a step with packs of all groups; 0: no limit
};

/// One setting (pack length, degree, recomputed layers).
struct GroupTrial {
  std::int64_t tokens = 0;
  int ranks = 1, recompute_layers = 0;
  double bytes = 0;    ///< of a rank, without packs of other groups
  double token_s = 0;  ///< rank-seconds a token: settings compare at equal tokens an iteration;
                       ///< infinite where memory does not suffice
};

struct GroupSelection {
  std::vector<GroupTrial>
      trials;  ///< all that were looked at, by length and degree, derived groups last
  std::vector<PackGroup> groups;  ///< ready for batching.groups, group_ranks and group_recompute
  double bytes = 0;               ///< of a rank in a step with packs of all `groups`
};

/// Layers to recompute so that a pack fits (Algorithm 4): from the memory left with none and with
/// all of them recomputed, rounded up and clamped; -1 when not even all of them suffice.
int recomputed_layers(std::int64_t tokens, int ranks, const GroupSearch& search,
                      const PackCosts& costs);

/// Algorithm 1.  Stage 1 finds for every length its best degree (Algorithm 3) and takes the best
/// length and the longest; stage 2 adds the lengths that one rank's part of them is (Equation 5):
/// groups whose packs need no communication.  Deviations: times per token, duplicate lengths
/// merged, derived groups looked at too (the second keeps the degree of the group before it, since
/// degrees must not fall). `packs`: packs of a length as naive packing makes them.  Each group
/// keeps within the limit by itself.  Errors: no lengths or degrees, a longest length that fits at
/// no degree.
GroupSelection select_groups(
    const GroupSearch& search,
    const std::function<std::vector<MicroBatch>(std::int64_t tokens)>& packs,
    const PackCosts& costs);

/// Stage 3, ours: what Algorithm 1 cannot see is how the groups' packs of a global batch meet: few
/// long packs on one rank each leave the others waiting.  Goes from the selected groups to better
/// ones, one change at a time (a trial's setting joins, replaces the group of its length, or a
/// group leaves), the best change first, while `seconds`, the planned time of the data's batches,
/// falls by more than 0.1 %.  The longest length stays, lengths ascend, degrees do not fall.
/// Returns the groups.
std::vector<PackGroup> refine_groups(
    const GroupSelection& selection,
    const std::function<double(const std::vector<PackGroup>&)>& seconds);

/// A run's batches by groups.
struct GroupedRun {
  std::function<double(const std::vector<PackGroup>&)> seconds;  ///< as planned
  std::function<std::vector<StepPlan>(const std::vector<PackGroup>&)> first_steps;
};

/// Groups that keep within the limit together, full packs of all of them in a step and the run's
/// own packs alike: those of select_groups, where `refine` those of refine_groups.  Where they
/// exceed it, selected anew under a limit that is lower by the excess; the longest group alone
/// where that leaves it no room, whatever it takes.  Errors as select_groups.
GroupSelection select_groups_together(
    const GroupSearch& search,
    const std::function<std::vector<MicroBatch>(std::int64_t tokens)>& packs,
    const PackCosts& costs, const GroupedRun& run, bool refine);

}  // namespace ballast
