// When products of a shape are tried: the calls of layers over micro-batches of one length, of two
// in turn, and of lengths that pass.
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "kernels/cuda/runtime/trial_rule.hpp"

namespace ballast::cuda {
namespace {

constexpr int kProducts = 27;  // of a layer and micro-batch, each shape once

/// Shapes tried while micro-batches of `lengths` pass through `layers` layers, by a rule.
int trials(const std::vector<int>& lengths, int layers, const TrialRule& rule = TrialRule(1, 0)) {
  std::map<std::pair<int, int>, TrialRule> rules;
  std::int64_t calls = 0;
  int due = 0;
  for (const int length : lengths)
    for (int layer = 0; layer < layers; ++layer)
      for (int p = 0; p < kProducts; ++p)
        due += rules.try_emplace({length, p}, rule).first->second.due(++calls);
  return due;
}

std::vector<int> in_turn(int micro_batches, int lengths) {
  std::vector<int> list;
  for (int m = 0; m < micro_batches; ++m) list.push_back(m % lengths);
  return list;
}

TEST(TrialRule, TriesEveryShapeOfOneLengthOnceInAWindow) {
  for (const int layers : {12, 24, 36}) {
    const int calls = static_cast<int>(TrialRule::kFewestCalls);
    EXPECT_EQ(trials(in_turn((calls - 1) / layers, 1), layers), 0);
    EXPECT_EQ(trials(in_turn((calls + layers - 1) / layers, 1), layers), kProducts);
  }
}

TEST(TrialRule, WaitsForTheWorkThatPaysForIt) {
  constexpr double kFlops = 1e12;  // of a call: 40,000 of them are the work before a trial
  constexpr int kLayers = 32, kBatches = static_cast<int>(TrialRule::kWork / kFlops) / kLayers;
  const TrialRule rule(kFlops);
  EXPECT_EQ(trials(in_turn(kBatches - 1, 1), kLayers, rule), 0);
  EXPECT_EQ(trials(in_turn(kBatches + 1, 1), kLayers, rule), kProducts);
  EXPECT_EQ(trials(in_turn(3 * kBatches + 3, 3), kLayers, rule), 0);
  EXPECT_EQ(trials(in_turn(4, 1), kLayers, TrialRule(1e15)), kProducts);  // 128 calls at least
}

TEST(TrialRule, TriesTwoLengthsInTurnAndNoneOfMany) {
  EXPECT_GT(trials(in_turn(40, 2), 12), 0);
  EXPECT_EQ(trials(in_turn(400, 3), 12), 0);
  EXPECT_EQ(trials(in_turn(2000, 25), 36), 0);
}

TEST(TrialRule, ALengthThatComesToStayIsTriedAfterManyThatPassed) {
  std::vector<int> list = in_turn(300, 30);
  EXPECT_EQ(trials(list, 12), 0);
  list.insert(list.end(), 24, 100);
  EXPECT_GE(trials(list, 12), kProducts);
}

}  // namespace
}  // namespace ballast::cuda
