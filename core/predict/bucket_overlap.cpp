#include "core/predict/bucket_overlap.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ballast {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();

/// Share of the stage's layers in front of a bucket.
double layers_before(const StageBuckets& stage, const ParameterBucket& bucket) {
  if (bucket.final_at < 0) return 0;
  if (bucket.final_at == kHeadLayer) return 1;
  return static_cast<double>(bucket.final_at - stage.first_layer) /
         static_cast<double>(std::max<std::int64_t>(1, stage.layers));
}

double elements(const StageBuckets& stage) {
  double all = 0;
  for (const ParameterBucket& bucket : stage.buckets) all += static_cast<double>(bucket.elements);
  return std::max(all, 1.0);
}

}  // namespace

double exposed_reduction_s(const StageBuckets& stage, double reduce_s, double backward_s) {
  if (stage.buckets.size() < 2) return reduce_s;
  // Times count from the backward's end, so that an infinite one is none of them.
  const double all = elements(stage);
  double free_s = -kForever;
  for (auto bucket = stage.buckets.rbegin(); bucket != stage.buckets.rend(); ++bucket) {
    const double before = layers_before(stage, *bucket),
                 final_s = before > 0 ? -before * backward_s : 0;
    free_s = std::max(free_s, final_s) + reduce_s * static_cast<double>(bucket->elements) / all;
  }
  return std::max(0.0, free_s);
}

double exposed_gather_s(const StageBuckets& stage, double gather_s, double forward_s) {
  if (stage.buckets.size() < 2) return gather_s;
  const double all = elements(stage);
  double arrived_s = 0, waited_s = 0;
  for (const ParameterBucket& bucket : stage.buckets) {
    const double before = layers_before(stage, bucket),
                 needed_s = (before > 0 ? before * forward_s : 0) + waited_s;
    arrived_s += gather_s * static_cast<double>(bucket.elements) / all;
    waited_s += std::max(0.0, arrived_s - needed_s);
  }
  return waited_s;
}

HidingPasses::HidingPasses(const StepPlan& plan,
                           const std::vector<std::shared_ptr<const MicroBatchTimes>>& times)
    : plan_(plan), times_(times), meets_(plan.meets_in_backward()) {}

double HidingPasses::backward_s(std::size_t id, OpKind kind, std::size_t stage) const {
  const MicroBatchTimes& times = *times_[id];
  return kind == OpKind::backward_weight ? times.weight_s[stage] : times.backward[stage].total_s();
}

double HidingPasses::last_backward_s(const std::vector<std::vector<LaneStage>>& lanes,
                                     std::size_t stage) const {
  if (plan_.micro_batches.empty()) return kForever;
  if (!meets_) return 0;
  std::size_t latest = 0;
  for (std::size_t d = 1; d < lanes.size(); ++d)
    if (lanes[d][stage].end_s > lanes[latest][stage].end_s) latest = d;
  const std::vector<Op>& ops = plan_.schedule(static_cast<int>(latest)).stages[stage];
  const std::vector<char> ends = ends_gradients(ops);
  for (std::size_t i = ops.size(); i-- > 0;)
    if (ends[i] != 0)
      return backward_s(static_cast<std::size_t>(plan_.lanes[latest].micro_batches.at(
                            static_cast<std::size_t>(ops[i].micro_batch))),
                        ops[i].kind, stage);
  return 0;
}

std::vector<double> HidingPasses::round_backward_s(std::size_t stage) const {
  std::vector<double> seconds(static_cast<std::size_t>(plan_.rounds()), kForever);
  for (std::size_t d = 0; meets_ && d < plan_.lanes.size(); ++d) {
    const std::vector<Op>& ops = plan_.schedule(static_cast<int>(d)).stages[stage];
    const std::vector<char> ends = ends_gradients(ops);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (!completes_gradients(ops[i].kind)) continue;
      const auto id = static_cast<std::size_t>(
          plan_.lanes[d].micro_batches.at(static_cast<std::size_t>(ops[i].micro_batch)));
      double& shortest = seconds[static_cast<std::size_t>(plan_.micro_batches[id].round)];
      shortest = std::min(shortest, ends[i] != 0 ? backward_s(id, ops[i].kind, stage) : 0);
    }
  }
  for (double& s : seconds)
    if (std::isinf(s)) s = 0;
  return seconds;
}

double HidingPasses::first_forward_s(std::size_t stage) const {
  if (plan_.micro_batches.empty()) return kForever;
  double shortest = kForever;
  for (const PlannedLane& lane : plan_.lanes)
    for (const Op& op : plan_.schedules.at(static_cast<std::size_t>(lane.schedule)).stages[stage])
      if (op.kind == OpKind::forward) {
        const auto id = static_cast<std::size_t>(
            lane.micro_batches.at(static_cast<std::size_t>(op.micro_batch)));
        shortest = std::min(shortest, times_[id]->forward[stage].total_s());
        break;
      }
  return std::isinf(shortest) ? 0 : shortest;
}

}  // namespace ballast
