// What memory is replayed over: parts of ranks, and when a stage gives back what it sends.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/predict/memory_replay.hpp"
#include "tests/core/predict/lane_plans.hpp"

namespace ballast {
namespace {

std::vector<RankMicroBatch> parts_of(const std::vector<std::int64_t>& tokens) {
  std::vector<RankMicroBatch> list;
  for (const std::int64_t t : tokens) {
    RankMicroBatch& m = list.emplace_back();
    m.tokens = m.shard_tokens = t;
  }
  return list;
}

Op forward(int m) { return {OpKind::forward, m}; }
Op backward(int m) { return {OpKind::backward, m}; }
Op transfer(OpKind kind, int m, int peer) {
  const bool up = (kind == OpKind::send) == (peer == 1);
  return {kind, m, 0, peer, up ? Payload::activation : Payload::gradient};
}

/// Two stages; the first runs its three forwards at once, the second ends each micro-batch before
/// it takes the next.
Schedule ahead() {
  Schedule schedule;
  std::vector<Op> first, second;
  for (int m = 0; m < 3; ++m) {
    first.insert(first.end(), {forward(m), transfer(OpKind::send, m, 1)});
    second.insert(second.end(), {transfer(OpKind::recv, m, 0), forward(m), backward(m),
                                 transfer(OpKind::send, m, 0)});
  }
  for (int m = 0; m < 3; ++m)
    first.insert(first.end(), {transfer(OpKind::recv, m, 1), backward(m)});
  schedule.stages = {first, second};
  return schedule;
}

TEST(StageWork, ASendIsGivenBackOnceItsPeerComesToTheReceive) {
  // First stage: forwards end at 1, 2 and 3, backwards at 6, 9 and 12.  The second receives at 1,
  // 4 and 7.
  const auto equal = given_back(ahead(), parts_of({1, 1, 1}), true);
  EXPECT_EQ(equal[0][1], 2u) << "the peer waits: by the end of the next forward";
  EXPECT_EQ(equal[0][3], 7u) << "by the end of the first backward";
  EXPECT_EQ(equal[0][5], 9u) << "by the end of the second";
  // The first stage waits for gradients, and computes as soon as it has one.
  EXPECT_EQ(equal[1][3], 5u);
  EXPECT_EQ(equal[1][11], 12u) << "no computation follows";
  // The second stage is done with a short micro-batch before the first has made the next.
  const auto uneven = given_back(ahead(), parts_of({1, 8, 1}), true);
  EXPECT_EQ(uneven[0][1], 2u);
  EXPECT_EQ(uneven[0][3], 4u);
  EXPECT_EQ(uneven[0][5], 9u) << "the peer is at the long one";
}

TEST(StageWork, AHostThatWaitsForAGradientGivesBackWhatItHasSent) {
  Schedule schedule;
  schedule.stages = {
      {forward(0), transfer(OpKind::send, 0, 1), transfer(OpKind::recv, 0, 1), backward(0)},
      {transfer(OpKind::recv, 0, 0), forward(0), backward(0), transfer(OpKind::send, 0, 0)}};
  EXPECT_EQ(given_back(schedule, parts_of({4}), false)[0][1], 2u) << "in the receive";
  EXPECT_EQ(given_back(schedule, parts_of({4}), true)[0][1], 3u) << "its backward is queued too";
  // A receive that ends no later than the peer's tells nothing.
  EXPECT_EQ(given_back(ahead(), parts_of({1, 1, 1}), false),
            given_back(ahead(), parts_of({1, 1, 1}), true));
}

TEST(StageWork, AnOffloadedTensorIsGivenBackByTheNextComputation) {
  Schedule schedule;
  schedule.stages = {{{OpKind::offload, 0}, forward(0), backward(0)}};
  EXPECT_EQ(given_back(schedule, parts_of({4}), false)[0][0], 1u);
}

// 131 tokens on a zigzag ring of two: shards of 66 and 65; each on two Ulysses ranks.
TEST(StageWork, OfAUlyssesGroupTheFullestRankIsMeant) {
  const StepPlan plan = plan_of({of_lengths({131})}, pipeline_of(ScheduleKind::one_f_one_b, 1), 2,
                                {.sp = 2, .ring_inner = 2});
  const SequenceLayout layout = plan.layout(plan.micro_batches[0]);
  for (int ring_rank = 0; ring_rank < 2; ++ring_rank) {
    const RankMicroBatch part = lane_work(plan, 0, {}, ring_rank)[0].list[0];
    EXPECT_EQ(part.shard_tokens, layout.local_tokens(ring_rank));
    EXPECT_EQ(part.tokens, (layout.local_tokens(ring_rank) + 1) / 2);
  }
  EXPECT_EQ(layout.local_tokens(0) % 2 + layout.local_tokens(1) % 2, 1) << "one has an odd shard";
  const RankMicroBatch fullest = lane_work(plan, 0)[0].list[0];
  EXPECT_EQ(fullest.shard_tokens, std::max(layout.local_tokens(0), layout.local_tokens(1)));
}

TEST(StageWork, AStageThatIsAheadHoldsWhatItHasSent) {
  StageMemory stage;
  stage.model.layers = 2, stage.layers = 1, stage.last = false;
  stage.model.hidden = 8, stage.model.intermediate = 16, stage.model.vocabulary = 10;
  stage.model.query_heads = stage.model.kv_heads = 2, stage.model.head_dim = 4;
  stage.host = false;
  const std::vector<RankMicroBatch> list = parts_of({64, 64, 64});
  const std::vector<Op> ops = ahead().stages[0];
  StageWork held{ops, list, given_back(ahead(), list, true)[0]}, taken = held;
  taken.given_back[3] = 4;  // as if the second stage had waited for it
  const std::int64_t output = 64 * stage.model.hidden * 4;
  EXPECT_EQ(replay_memory(stage, held)[MemoryCategory::workspace],
            replay_memory(stage, taken)[MemoryCategory::workspace] + output);
}

}  // namespace
}  // namespace ballast
