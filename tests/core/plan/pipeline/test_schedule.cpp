// Schedule plans and the simulator; ChunkFlow's figures for plain 1F1B are checked by hand-written
// lists here.
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {
namespace {

/// Classic 1F1B over `stages` with micro-batches in order.
Schedule one_f_one_b(int stages, int micro_batches) {
  Schedule schedule;
  schedule.stages.resize(stages);
  for (int s = 0; s < stages; ++s) {
    auto& ops = schedule.stages[s];
    auto forward = [&](int m) {
      if (s > 0) ops.push_back({OpKind::recv, m, 0, s - 1, Payload::activation});
      ops.push_back({OpKind::forward, m});
      if (s + 1 < stages) ops.push_back({OpKind::send, m, 0, s + 1, Payload::activation});
    };
    auto backward = [&](int m) {
      if (s + 1 < stages) ops.push_back({OpKind::recv, m, 0, s + 1, Payload::gradient});
      ops.push_back({OpKind::backward, m});
      if (s > 0) ops.push_back({OpKind::send, m, 0, s - 1, Payload::gradient});
    };
    const int warmup = std::min(stages - 1 - s, micro_batches);
    for (int m = 0; m < warmup; ++m) forward(m);
    for (int m = 0; m < micro_batches; ++m) {
      if (m + warmup < micro_batches) forward(m + warmup);
      backward(m);
    }
  }
  return schedule;
}

ScheduleCosts by_length(std::vector<double> length) {
  return {[length](int, const Op& op) {
    if (op.kind == OpKind::forward) return length[op.micro_batch];
    if (op.kind == OpKind::backward) return 2 * length[op.micro_batch];
    return 0.0;
  }};
}

TEST(Schedule, BubbleRatiosOfChunkFlowSection3) {
  EXPECT_NEAR(simulate(one_f_one_b(4, 4), by_length({1, 1, 1, 1})).bubble_ratio, 3.0 / 7.0, 1e-12);
  EXPECT_NEAR(simulate(one_f_one_b(4, 4), by_length({4, 2, 1, 1})).bubble_ratio, 4.0 / 7.0, 1e-12);
  EXPECT_NEAR(simulate(one_f_one_b(4, 2), by_length({4, 4})).bubble_ratio, 0.6, 1e-12);
}

TEST(Schedule, LiveActivationsOf1F1B) {
  EXPECT_EQ(
      simulate(one_f_one_b(4, 8), by_length(std::vector<double>(8, 1.0))).peak_live_activations,
      (std::vector<int>{4, 3, 2, 1}));
}

// Two micro-batches on one stage, by hand: what the weight half needs stays until it has run.
TEST(Schedule, ActivationsLiveUntilTheWeightHalf) {
  const Schedule late{{{{OpKind::forward, 0},
                        {OpKind::backward_input, 0},
                        {OpKind::forward, 1},
                        {OpKind::backward_weight, 0},
                        {OpKind::backward_input, 1},
                        {OpKind::backward_weight, 1}}}};
  EXPECT_EQ(problems(late), "");
  const ScheduleCosts one{[](int, const Op&) { return 1.0; }};
  EXPECT_EQ(simulate(late, one).peak_live_activations, std::vector<int>{2});
  EXPECT_EQ(simulate(late, one).peak_weight_halves, std::vector<int>{1});
  Schedule soon = late;
  std::swap(soon.stages[0][2], soon.stages[0][3]);  // the weight half before the next forward
  EXPECT_EQ(simulate(soon, one).peak_live_activations, std::vector<int>{1});
  Schedule kept = late;
  std::swap(kept.stages[0][3], kept.stages[0][4]);  // both weight halves at the end
  EXPECT_EQ(simulate(kept, one).peak_weight_halves, std::vector<int>{2});
}

TEST(Schedule, OneStageAccumulatesInOrder) {
  const Schedule schedule =
      plan_schedule({{{{0, 0, 1, 0}}}, {{{1, 0, 2, 0}}}, {{{2, 0, 3, 0}}}}, {});
  EXPECT_EQ(problems(schedule), "");
  const auto result = simulate(schedule, by_length({1, 2, 3}));
  EXPECT_DOUBLE_EQ(result.step_time_s, 18);
  EXPECT_DOUBLE_EQ(result.bubble_ratio, 0);
  EXPECT_EQ(result.peak_live_activations, std::vector<int>{1});
  EXPECT_EQ(result.stages[0].size(), 6u);
  EXPECT_EQ(result.stages[0][3].op.kind, OpKind::backward);
}

TEST(Schedule, SendsArePostedAndArriveLater) {
  const auto result =
      simulate(one_f_one_b(2, 1), {[](int, const Op& op) {
                 return op.kind == OpKind::send ? 0.5 : op.kind == OpKind::recv ? 0.0 : 1.0;
               }});
  EXPECT_DOUBLE_EQ(result.step_time_s, 1 + 0.5 + 1 + 1 + 0.5 + 1);
}

TEST(Schedule, ProblemsAndDeadlocksAreNamed) {
  EXPECT_EQ(problems(one_f_one_b(4, 6)), "");
  Schedule missing = one_f_one_b(2, 1);
  std::erase_if(missing.stages[0], [](const Op& op) { return op.kind == OpKind::send; });
  EXPECT_NE(problems(missing).find("recv without its counterpart"), std::string::npos);
  try {
    simulate(missing, by_length({1}));
    FAIL() << "a receive without a send must be reported";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("stage 1 recv of micro-batch 0"), std::string::npos)
        << e.what();
  }
  EXPECT_NE(problems({{{{OpKind::backward, 0}}}}).find("before its forward"), std::string::npos);
  EXPECT_NE(problems({{{{OpKind::forward, 0}}}}).find("no backward"), std::string::npos);
  EXPECT_NE(one_f_one_b(2, 1).hash(), one_f_one_b(2, 2).hash());
}

TEST(Schedule, BackwardsThatEndGradients) {
  const Op forward{OpKind::forward}, backward{OpKind::backward}, send{OpKind::send},
      input{OpKind::backward_input}, weight{OpKind::backward_weight}, join{OpKind::collective};
  using Ends = std::vector<char>;
  // Without collectives the last one of all, whatever it still sends.
  EXPECT_EQ(ends_gradients({forward, backward, forward, backward, send}), (Ends{0, 0, 0, 1, 0}));
  EXPECT_EQ(ends_gradients({input, input, weight, weight}), (Ends{0, 0, 0, 1}));
  EXPECT_EQ(ends_gradients({input, weight, send}), (Ends{0, 0, 0}));
  // With them each that one follows: not where another op is between.
  EXPECT_EQ(ends_gradients({join, forward, backward, send, join, join, backward, join}),
            (Ends{0, 0, 1, 0, 0, 0, 1, 0}));
  EXPECT_EQ(ends_gradients({backward, forward, join, input, weight, join}),
            (Ends{0, 0, 0, 0, 1, 0}));
  EXPECT_EQ(ends_gradients({forward}), Ends{0});
}

}  // namespace
}  // namespace ballast
