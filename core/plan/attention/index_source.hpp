// IndexSource: where attention over context-parallel ranks takes its patterns from.  One per
// micro-batch; sources that look at Q and K and those that do not look alike to it.
#pragma once
#include <tuple>
#include <utility>
#include <vector>

#include "core/observe/events.hpp"
#include "core/plan/attention/attention_executor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "core/plan/attention/key_axis.hpp"

namespace ballast {

class IndexSource {
 public:
  explicit IndexSource(AttentionAxes axes) : axes_(std::move(axes)) {}
  virtual ~IndexSource() = default;
  /// [shard] (or [turn * shards + shard], as axes().calls()): this rank's queries against those
  /// keys, for layer `in.layer`.  Made at the layer's first forward of the micro-batch; the same
  /// objects at every later call (recomputation, backward).  Collective over the ring where the
  /// pattern depends on Q and K.
  virtual const std::vector<AttentionWork>& shards(const AttentionInputs& in) = 0;
  /// Whether shards() of this layer will look at `in.k`, which then holds all keys of
  /// axes().keys[rank].
  virtual bool reads_keys(int /*layer*/) const { return false; }
  const AttentionAxes& axes() const { return axes_; }

 private:
  AttentionAxes axes_;
};

/// Hands the recorder a row for each of `heads`: what `shards` compute of the `visible` pairs, and
/// the budget, overflow, its mass and kind that budget_of(head) names.  Shard: AttentionPattern or
/// AttentionWork, whose index heads may be one for all.
template <class Shard, class BudgetOf>
void record_budgets(Recorder* recorder, int layer, int heads, const std::vector<Shard>& shards,
                    double visible, BudgetOf&& budget_of) {
  if (recorder == nullptr || !recorder->enabled || shards.empty()) return;
  for (int h = 0; h < heads; ++h) {
    BudgetRow row;
    row.layer = layer;
    row.head = h;
    row.visible_pairs = visible;
    for (const Shard& shard : shards) row.computed_pairs += shard.counts().pairs(h);
    std::tie(row.budget, row.overflow, row.overflow_mass, row.kind) = budget_of(h);
    recorder->budget(row);
  }
}

}  // namespace ballast
