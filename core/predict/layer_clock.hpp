// First level of the clock: one layer of a micro-batch over the ranks of its group.  Attention
// turns round the ring with its hops overlapped, exchanges of heads stand before and after it.
#pragma once
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>

#include "core/plan/context/ring_plan.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/costs.hpp"

namespace ballast {

/// Where the time of a pass goes, in seconds.
struct PassParts {
  double compute_s = 0;    ///< forward or backward itself, an even share of each rank
  double recompute_s = 0;  ///< forward that runs again
  double ring_s = 0;       ///< what hops, joined sums and the ranks' uneven parts add
  double exchange_s = 0;   ///< all-to-alls
  double total_s() const { return compute_s + recompute_s + ring_s + exchange_s; }
  PassParts& add(const PassParts& other, double times = 1);
};

struct LayerParts {
  PassParts forward, backward;
  double weight_s = 0;  ///< of backward.compute_s: weight gradients
};

class LayerClock {
 public:
  /// Both must outlive it.
  LayerClock(const StepPlan& plan, const Costs& costs) : plan_(plan), costs_(costs) {}
  /// `budget`: key blocks a query in this layer; 0: as Costs::attention.
  LayerParts layer(const PlannedMicroBatch& micro_batch, std::int64_t budget, Recompute mode);
  /// Pairs that the fullest rank of its ring computes for a micro-batch, over an even share of the
  /// visible ones (LayoutBalance::cost); of a sparse pattern PatternWork::uneven.
  double uneven(const PlannedMicroBatch& micro_batch);

 private:
  const RingPlan& ring(const ContextSplit& split);

  const StepPlan& plan_;
  const Costs& costs_;
  std::map<std::pair<int, int>, RingPlan> rings_;
  std::unordered_map<std::uint64_t, double> uneven_;  ///< by shape of the micro-batch
};

/// Hash of all that decides a micro-batch's times but the samples that it holds.
std::uint64_t shape_hash(const PlannedMicroBatch& micro_batch);

}  // namespace ballast
