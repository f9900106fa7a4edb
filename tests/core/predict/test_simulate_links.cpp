// Transfers of a step take the links that its mesh has for them.
#include <gtest/gtest.h>

#include "core/predict/micro_batch_times.hpp"
#include "core/predict/placement_costs.hpp"
#include "core/predict/simulate.hpp"
#include "tests/core/predict/lane_plans.hpp"

namespace ballast {
namespace {

/// A pass of one layer takes 1 and 2; transfers take what their link says.
class LinkTimes final : public Costs {
 public:
  std::string source() const override { return "test"; }
  PassTime rest(std::int64_t, const ContextSplit&, Recompute) const override { return {1, 2}; }
  PassTime head(std::int64_t, const ContextSplit&) const override { return {}; }
  PassTime attention(std::int64_t, std::int64_t, std::int64_t, const ContextSplit&,
                     Recompute) const override {
    return {};
  }
  double exchange(std::int64_t, const ContextSplit& split, Link link) const override {
    return split.sp == 1 ? 0 : link == Link::node ? 0.125 : 16;
  }
  double ring_hop(std::int64_t, const ContextSplit&, RingLevel, bool, Link link) const override {
    return link == Link::node ? 0.25 : 32;
  }
  double stage_hop(std::int64_t, const ContextSplit&, Link link) const override {
    return link == Link::node ? 0.25 : 4;
  }
  double host_copy(std::int64_t, const ContextSplit&) const override { return 0; }
  double reduce(const Collective& sum) const override {
    return sum.elements == 1 ? 0 : sum.link == Link::node ? 0.5 : 8;
  }
  double gather(const Collective& all) const override { return all.link == Link::node ? 1 : 64; }
  double optimizer(std::int64_t, bool) const override { return 0; }
};

/// A step of one micro-batch in each of two lanes of `stages`, on nodes of so many ranks.
double step_s(int stages, int node, const std::vector<PlannedCollective>& collectives) {
  StepPlan plan = plan_of({of_lengths({6}), of_lengths({6})},
                          pipeline_of(ScheduleKind::one_f_one_b, stages), stages);
  plan.mesh.ranks_per_node = node;
  plan.zero = 1;
  plan.collectives = collectives;
  return simulate(plan, {.layers = stages}, LinkTimes()).step_s;
}

// Stages lie side by side, the lanes' ranks of a stage a pipeline apart.
TEST(SimulateLinks, OfStagesAndReplicasAreThoseOfTheirRanks) {
  const std::vector<PlannedCollective> sum{{CollectiveKind::gradient_reduce, 0, -1, 100}},
      gather{{CollectiveKind::parameter_gather, 0, -1, 100}},
      tied{{CollectiveKind::tied_sum, 0, -1, 100}};
  for (const auto& [node, hop, outside] :
       {std::tuple{0, 0.25, false}, {4, 0.25, false}, {2, 0.25, true}, {1, 4.0, true}}) {
    const double passes = 6 + 2 * hop;
    EXPECT_DOUBLE_EQ(step_s(2, node, {}), passes) << node;
    EXPECT_DOUBLE_EQ(step_s(2, node, sum), passes + (outside ? 8 : 0.5)) << node;
    EXPECT_DOUBLE_EQ(step_s(2, node, gather), passes + (outside ? 64 : 1)) << node;
    EXPECT_DOUBLE_EQ(step_s(2, node, tied), passes + (node == 1 ? 8 : 0.5)) << node;
  }
  // The second of three hops goes to another node, in both directions.
  EXPECT_DOUBLE_EQ(step_s(4, 2, {}), 12 + 2 * (0.25 + 4 + 0.25));
  EXPECT_DOUBLE_EQ(step_s(4, 2, tied), 12 + 2 * (0.25 + 4 + 0.25) + 8);
}

// Joined data-parallel ranks exchange heads a pipeline apart; the clock and placement say the same.
TEST(SimulateLinks, OfJoinedRanksAreThoseOfTheirMesh) {
  for (const int pp : {1, 4}) {
    PlacedWork work;
    work.layers = pp;
    work.mesh.dp = 2, work.mesh.pp = pp, work.mesh.ranks_per_node = 4;
    StepPlan plan;
    plan.mesh = work.mesh;
    plan.layer_begin = {0, 1, 2, 3};
    plan.layer_begin.resize(static_cast<std::size_t>(pp));
    plan.layouts = {{LayoutKind::document_zigzag, 64, 1}};
    PlannedMicroBatch& m = plan.micro_batches.emplace_back();
    m.segments = {{0, 0, 640, 0}};
    m.group = {0, 2};
    const LinkTimes costs;
    const auto clock_s = [&] {
      const auto times = MicroBatchClock(plan, {.layers = pp}, costs).times(0);
      return times->forward_s() + times->backward_s();
    };
    m.split = joined_split(work.mesh, 2, 2);
    ASSERT_EQ(m.split, (ContextSplit{2, 1, 1}));
    const double exchange = pp == 1 ? 0.125 : 16;
    EXPECT_DOUBLE_EQ(clock_s(), 3 + 2 * exchange);
    EXPECT_DOUBLE_EQ(StepPlacementCosts(costs, work).transfer_s(640, 0, {2, 2, 1}), 2 * exchange);
    m.split = joined_split(work.mesh, 2, 1);
    ASSERT_EQ(m.split, (ContextSplit{1, 1, 2}));
    EXPECT_GT(clock_s(), 3 + (pp == 1 ? 0 : 32));
    EXPECT_LT(clock_s(), 3 + (pp == 1 ? 2 : 200));
    EXPECT_DOUBLE_EQ(StepPlacementCosts(costs, work).transfer_s(640, 0, {2, 1, 2}),
                     3 * (pp == 1 ? 0.25 : 32));
  }
}

}  // namespace
}  // namespace ballast
