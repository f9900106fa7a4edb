// What placement goes by is what the clock says of the same micro-batch.
#include <gtest/gtest.h>

#include "core/model/presets.hpp"
#include "core/predict/micro_batch_times.hpp"
#include "core/predict/placement_costs.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/predict/stated_costs.hpp"

namespace ballast {
namespace {

/// Seconds of one stage by the clock, mean over the stages.
double clock_s(const std::vector<Segment>& segments, const PlacementSplit& split,
               const PlacedWork& work, const Costs& costs) {
  StepPlan plan;
  plan.mesh = work.mesh;
  plan.layouts = {{LayoutKind::document_zigzag, 64, 1}};
  plan.layer_begin.clear();
  for (int s = 0; s < work.mesh.pp; ++s) plan.layer_begin.push_back(work.layers * s / work.mesh.pp);
  PlannedMicroBatch& m = plan.micro_batches.emplace_back();
  m.segments = segments;
  m.group = {0, split.ranks};
  m.split = {split.sp, 1, split.ring};
  SimulationOptions options;
  options.layers = work.layers;
  options.recompute = work.recompute;
  options.base_budget = work.budget;
  const auto times = MicroBatchClock(plan, options, costs).times(0);
  return times->forward_s() + times->backward_s();
}

std::shared_ptr<const Costs> rates() {
  WorkShape shape;
  shape.model = model_preset("qwen2.5-0.5b");
  return std::make_shared<RateCosts>(device_rates(DeviceKind::h200), shape);
}

std::shared_ptr<const Costs> stated() {
  StatedTimes times;
  times.token_s = 4e-5, times.pair_s = 1.3e-9, times.exchange_token_s = 1.5e-5;
  return std::make_shared<StatedCosts>(times);
}

TEST(StepPlacementCosts, AreTheClocksForUlyssesGroupsStagesAndRecompute) {
  const std::vector<Segment> segments{{0, 0, 9000, 0}, {1, 0, 300, 0}, {2, 0, 4000, 0}},
      chunk{{0, 8000, 16000, 0}};
  for (const auto& costs : {rates(), stated()})
    for (const int pp : {1, 2, 4})
      for (const int recomputed : {0, 2, -1}) {
        PlacedWork work;
        work.layers = 24;
        work.mesh.pp = pp;
        work.recompute = {recomputed == 0 ? Recompute::none : Recompute::full, recomputed};
        const StepPlacementCosts placement(*costs, work);
        for (const int sp : {1, 2, 7})
          for (const auto& list : {segments, chunk}) {
            const PlacementSplit split{sp, sp, 1};
            const double expected = clock_s(list, split, work, *costs);
            EXPECT_NEAR(seconds(list, split, placement, 1), expected, 1e-6 * expected)
                << costs->source() << " pp " << pp << " sp " << sp << " recomputed " << recomputed;
          }
      }
}

TEST(StepPlacementCosts, RingsThatAttentionHidesCostNoMoreThanTheClockSays) {
  PlacedWork work;
  work.layers = 24;
  const auto costs = rates();
  const StepPlacementCosts placement(*costs, work);
  const std::vector<Segment> one{{0, 0, 262144, 0}};
  const PlacementSplit ring{4, 1, 4};
  const double expected = clock_s(one, ring, work, *costs);
  EXPECT_NEAR(seconds(one, ring, placement, 1), expected, 0.1 * expected);
}

// Attention of a rank, a quarter of all, hides hops of a ring of four; the rest is waited for.
TEST(StepPlacementCosts, RingsWaitForWhatAttentionDoesNotHide) {
  PlacedWork work;
  work.layers = 24;
  work.mesh.ranks_per_node = 1;
  WorkShape shape;
  shape.model = model_preset("qwen2.5-0.5b");
  const RateCosts costs(device_rates(DeviceKind::h200), shape);
  const StepPlacementCosts placement(costs, work);
  const PlacementSplit ring{4, 1, 4};
  const ContextSplit split = context_split(work.mesh, 1, 4);
  const RingLevel level = split.ring_outer > 1 ? RingLevel::outer : RingLevel::inner;
  const double hops = 24 * (2 * costs.ring_hop(8192, split, level, false, Link::network) +
                            costs.ring_hop(8192, split, level, true, Link::network)),
               attention_s = 2 * hops;
  EXPECT_NEAR(placement.transfer_s(8192, attention_s, ring), 3 * (hops - attention_s / 4),
              1e-9 * hops);
  EXPECT_EQ(placement.transfer_s(8192, 5 * hops, ring), 0);
}

TEST(StepPlacementCosts, ABudgetMakesLongSamplesCheap) {
  PlacedWork dense, sparse;
  dense.layers = sparse.layers = 24;
  sparse.budget = 32;
  const auto costs = rates();
  const StepPlacementCosts all(*costs, dense), some(*costs, sparse);
  EXPECT_LT(some.attention_s(131072, 0, {}), 0.2 * all.attention_s(131072, 0, {}));
  EXPECT_EQ(some.attention_s(1000, 0, {}), all.attention_s(1000, 0, {}));
  EXPECT_EQ(all.bytes(1001, 5000, {4, 4, 1}), 251);
}

}  // namespace
}  // namespace ballast
