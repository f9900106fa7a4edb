// What computation hides of reductions and gathers that go bucket by bucket beside it, as
// parallel/optimizer/zero runs them.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/model/parameter_buckets.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/lane_clock.hpp"

namespace ballast {

/// A stage's buckets over its layers [first_layer, first_layer + layers).
struct StageBuckets {
  std::vector<ParameterBucket> buckets;
  std::int64_t first_layer = 0, layers = 1;
};

/// Seconds by which a reduction of all buckets, `reduce_s` long, outlasts a backward of
/// `backward_s` during which it runs: one bucket after another, each from when the backward has
/// passed its layers.  All of it with fewer than two buckets.
double exposed_reduction_s(const StageBuckets& stage, double reduce_s, double backward_s);

/// Seconds for which a forward of `forward_s` waits for buckets whose gather, `gather_s` long,
/// begins with it, first bucket first.
double exposed_gather_s(const StageBuckets& stage, double gather_s, double forward_s);

/// Seconds of the backwards and forwards that a step hides reductions and gathers behind.
class HidingPasses {
 public:
  /// `times`: [micro-batch id]; all must outlive it.
  HidingPasses(const StepPlan& plan,
               const std::vector<std::shared_ptr<const MicroBatchTimes>>& times);
  /// Of the last backward of the lane that ends last, 0 where ranks do not meet inside it; without
  /// any micro-batch infinite, so that what nothing can hide is left.
  double last_backward_s(const std::vector<std::vector<LaneStage>>& lanes, std::size_t stage) const;
  /// [round]: of the shortest backward of a round; 0 where it has none.
  std::vector<double> round_backward_s(std::size_t stage) const;
  /// Of the shortest first forward of a lane, which the next step is taken to begin with as well.
  double first_forward_s(std::size_t stage) const;

 private:
  double backward_s(std::size_t id, OpKind kind, std::size_t stage) const;
  const StepPlan& plan_;
  const std::vector<std::shared_ptr<const MicroBatchTimes>>& times_;
  bool meets_;
};

}  // namespace ballast
