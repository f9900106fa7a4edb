// What a backward or forward hides of reductions and gathers that run beside it, bucket by bucket.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/random.hpp"
#include "core/predict/bucket_overlap.hpp"
#include "tests/core/predict/lane_plans.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

ParameterBucket bucket(std::int64_t elements, std::int64_t final_at) {
  ParameterBucket b;
  b.elements = elements;
  b.final_at = final_at;
  return b;
}

/// Embedding, four layers, head, all of the same size.
StageBuckets even() {
  StageBuckets stage;
  for (std::int64_t layer = -1; layer < 4; ++layer) stage.buckets.push_back(bucket(10, layer));
  stage.buckets.push_back(bucket(10, kHeadLayer));
  stage.layers = 4;
  return stage;
}

TEST(BucketOverlap, OneBucketHidesNothing) {
  StageBuckets stage;
  EXPECT_EQ(exposed_reduction_s(stage, 3, 100), 3);
  stage.buckets = {bucket(10, -1)};
  EXPECT_EQ(exposed_reduction_s(stage, 3, 100), 3);
  EXPECT_EQ(exposed_gather_s(stage, 3, 100), 3);
}

TEST(BucketOverlap, TheLastBucketsStayWhereWiresAreFast) {
  // A second a bucket, ten a layer: embedding and first layer are final when backward ends.
  EXPECT_DOUBLE_EQ(exposed_reduction_s(even(), 6, 40), 2);
  EXPECT_DOUBLE_EQ(exposed_reduction_s(even(), 6, std::numeric_limits<double>::infinity()), 2);
  // Without a backward around it nothing is hidden; on slow wires all but what the backward takes.
  EXPECT_DOUBLE_EQ(exposed_reduction_s(even(), 6, 0), 6);
  EXPECT_DOUBLE_EQ(exposed_reduction_s(even(), 600, 40), 560);
}

TEST(BucketOverlap, AForwardWaitsForItsFirstBuckets) {
  EXPECT_DOUBLE_EQ(exposed_gather_s(even(), 6, 40), 2);
  EXPECT_DOUBLE_EQ(exposed_gather_s(even(), 6, std::numeric_limits<double>::infinity()), 2);
  EXPECT_DOUBLE_EQ(exposed_gather_s(even(), 6, 0), 6);
  EXPECT_DOUBLE_EQ(exposed_gather_s(even(), 600, 40), 560);
}

// Two lanes of two micro-batches, each of a round of its own, which their reduction ends.
TEST(BucketOverlap, PassesThatHideAreTheLastLanesAndTheShortest) {
  StepPlan plan = plan_of({of_lengths({1, 1}), of_lengths({1, 1})},
                          pipeline_of(ScheduleKind::one_f_one_b, 1), 1);
  plan.zero = 2;
  plan.micro_batches[1].round = plan.micro_batches[3].round = 1;
  for (Schedule& schedule : plan.schedules) {
    std::vector<Op>& ops = schedule.stages[0];
    ops.insert(ops.begin() + 2, {OpKind::collective, 0});
    ops.push_back({OpKind::collective, 1});
  }
  std::vector<std::shared_ptr<const MicroBatchTimes>> times;
  for (const auto& [forward_s, backward_s] :
       {std::pair{10.0, 20.0}, {11.0, 22.0}, {13.0, 26.0}, {5.0, 29.0}}) {
    MicroBatchTimes of;
    of.forward.push_back({.compute_s = forward_s});
    of.backward.push_back({.compute_s = backward_s});
    of.weight_s.push_back(backward_s / 4);
    times.push_back(std::make_shared<const MicroBatchTimes>(of));
  }
  const HidingPasses hiding(plan, times);
  std::vector<std::vector<LaneStage>> lanes(2, std::vector<LaneStage>(1));
  lanes[0][0].end_s = 70, lanes[1][0].end_s = 60;
  EXPECT_EQ(hiding.last_backward_s(lanes, 0), 22);
  lanes[1][0].end_s = 80;
  EXPECT_EQ(hiding.last_backward_s(lanes, 0), 29);
  EXPECT_EQ(hiding.round_backward_s(0), (std::vector<double>{20, 22}));
  EXPECT_EQ(hiding.first_forward_s(0), 10);
}

// Against clocks that go through the layers in small ticks.
TEST(BucketOverlap, FollowsAClockOfTicks) {
  for (std::uint64_t draw = 0; draw < 200; ++draw) {
    std::uint64_t count = 0;
    const auto any = [&](std::uint64_t n) {
      return static_cast<std::int64_t>(
          random_bits(test_seed() + draw, stream_of("bucket_overlap"), count++) % n);
    };
    StageBuckets stage;
    stage.first_layer = any(5);
    stage.layers = 1 + any(8);
    if (stage.first_layer == 0) stage.buckets.push_back(bucket(1 + any(50), -1));
    for (std::int64_t l = 0; l < stage.layers; ++l)
      if (l == 0 || any(2) == 0)
        stage.buckets.push_back(bucket(1 + any(50), stage.first_layer + l));
    if (any(2) == 0) stage.buckets.push_back(bucket(1 + any(50), kHeadLayer));
    if (stage.buckets.size() < 2) continue;
    const double pass_s = static_cast<double>(any(100)), wire_s = static_cast<double>(any(100));
    double all = 0;
    for (const ParameterBucket& b : stage.buckets) all += static_cast<double>(b.elements);
    const double layer_s = pass_s / static_cast<double>(stage.layers);

    double now = 0, free = 0;  // backward, layer by layer from the last
    std::size_t left = stage.buckets.size();
    const auto final_from = [&](std::int64_t layer) {
      for (; left > 0 && stage.buckets[left - 1].final_at >= layer; --left)
        free = std::max(free, now) +
               wire_s * static_cast<double>(stage.buckets[left - 1].elements) / all;
    };
    final_from(stage.first_layer + stage.layers);
    for (std::int64_t l = stage.layers; l-- > 0;) {
      now += layer_s;
      final_from(stage.first_layer + l);
    }
    final_from(-1);
    EXPECT_NEAR(exposed_reduction_s(stage, wire_s, pass_s), std::max(0.0, free - now), 1e-9)
        << "seed " << test_seed() << ", draw " << draw;

    now = 0;  // forward
    double arrived = 0;
    std::size_t next = 0;
    const auto need_until = [&](std::int64_t layer) {
      for (; next < stage.buckets.size() && stage.buckets[next].final_at <= layer; ++next)
        arrived += wire_s * static_cast<double>(stage.buckets[next].elements) / all;
      now = std::max(now, arrived);
    };
    need_until(-1);
    for (std::int64_t l = 0; l < stage.layers; ++l) {
      need_until(stage.first_layer + l);
      now += layer_s;
    }
    need_until(kHeadLayer);
    EXPECT_NEAR(exposed_gather_s(stage, wire_s, pass_s), now - pass_s, 1e-9)
        << "seed " << test_seed() << ", draw " << draw;
  }
}

}  // namespace
}  // namespace ballast
