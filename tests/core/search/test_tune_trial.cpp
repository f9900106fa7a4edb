// Trials of `ballast tune`: the fullest rank, what tuning covers, what is refused.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/predict/memory_replay.hpp"
#include "core/search/tune_trial.hpp"
#include "tests/core/search/tune_decks.hpp"

namespace ballast {
namespace {

/// [dp] Peak bytes of each data-parallel rank.
std::vector<std::int64_t> lane_bytes(const StepPlan& plan, const std::vector<StageMemory>& stages) {
  std::vector<std::int64_t> bytes(plan.lanes.size(), 0);
  for (std::size_t d = 0; d < bytes.size(); ++d) {
    const std::vector<StageWork> work = lane_work(plan, static_cast<int>(d));
    for (std::size_t s = 0; s < stages.size(); ++s)
      bytes[d] = std::max(bytes[d], replay_memory(stages[s], work[s]).total());
  }
  return bytes;
}

// Ranks of one group may hold unlike micro-batches beside what they share, and others more.
TEST(TuneTrials, MemoryIsThatOfTheFullestRank) {
  const Config base = deck();
  TuneInput in = input(base, 4, {1500, 900, 512, 500, 470, 450, 300, 256, 130, 128, 64, 64, 40});
  in.longest = {99, 2048, 0};
  std::vector<SampleLength> samples = in.steps[0];
  samples[0].tokens = 2048;
  TuneTrials trials(in);
  std::size_t compared = 0, elsewhere = 0;
  for (Candidate c : tune_space(base, 4, 2048, {0}).candidates) {
    const bool groups = c.method == Batching::hbp || c.method == Batching::balanced;
    if (!groups || c.mesh.dp != 4) continue;
    const Trial trial = trials.run(c);
    if (trial.state != TrialState::fits) continue;
    const Config config = with(base, c);
    const RunOptions options = RunOptions::from(config);
    const SimulationOptions simulation = simulation_options(config, options);
    const auto costs = in.costs(config);
    const StepOptions step = step_options(config, options, simulation, *costs);
    const std::vector<StageMemory> stages = stage_memories(config, options);
    const StepPlan plan = plan_step(0, samples, step);
    const std::vector<std::int64_t> own = lane_bytes(plan_step(0, in.steps[0], step), stages),
                                    all = lane_bytes(plan, stages);
    const std::int64_t most = *std::max_element(all.begin(), all.end());
    EXPECT_EQ(trial.bytes, std::max(most, *std::max_element(own.begin(), own.end())))
        << describe(c);
    ++compared;
    std::int64_t first = 0;  // of the group
    for (const PlannedMicroBatch& m : plan.micro_batches)
      for (const Segment& s : m.segments)
        if (s.sample == samples[0].sample)
          first = std::max(first, all[static_cast<std::size_t>(m.group.first)]);
    elsewhere += first < most;
  }
  EXPECT_GT(compared, 5u);
  EXPECT_GT(elsewhere, 0u) << "the first rank is always the fullest, so this shows nothing";
}

TEST(TuneTrials, WhatIsRefusedRunsNoFurther) {
  Config base = deck();
  base.optimizer.kind = OptimizerKind::muon;
  TuneInput in = input(base, 2, kMixed);
  TuneTrials trials(in);
  Candidate c;
  c.method = Batching::packed, c.capacity = 2048, c.mesh.dp = 2, c.zero = 2;
  const Trial refused = trials.run(c);
  ASSERT_EQ(refused.state, TrialState::refused);
  for (const bool in_turn : {false, true}) {
    const Trial longer = trials.longer(refused, 2, in_turn);
    EXPECT_EQ(longer.state, TrialState::refused);
    EXPECT_EQ(longer.steps, 0);
    EXPECT_EQ(longer.words, refused.words);
  }
}

/// Budgets that tuning lowers as far as it may.
Config tuned_deck(double threshold) {
  Config base = deck();
  base.attention.pattern = PatternKind::moba;
  base.attention.moba_block = 64, base.attention.moba_top_k = 16;
  base.dst.enabled = true, base.dst.anchor = Anchor::min;
  base.dst.threshold = threshold, base.dst.base_budget = 16;
  base.dst.simulated_coverage = {8};
  base.costs.forward_token_s = 1e-9, base.costs.forward_pair_s = 2e-9;
  return base;
}

TEST(TuneTrials, TunedBudgetsKeepTheCoverage) {
  Candidate c;
  c.method = Batching::none, c.mesh.dp = 2, c.capacity = 512;
  const std::vector<std::int64_t> lengths{4096, 4096, 2048, 64};
  TuneInput wide = input(tuned_deck(0.9), 2, lengths), narrow = input(tuned_deck(0.01), 2, lengths);
  wide.limits.coverage = narrow.limits.coverage = 0.9;
  const Trial kept = TuneTrials(narrow).run(c);
  ASSERT_EQ(kept.state, TrialState::fits) << kept.words;
  EXPECT_GE(kept.covered, 0.9 * kept.covered_of);
  const Trial lost = TuneTrials(wide).run(c);
  EXPECT_EQ(lost.state, TrialState::refused);
  EXPECT_TRUE(lost.uncovered);
  EXPECT_NE(lost.words.find("less than --coverage 0.9"), std::string::npos) << lost.words;
  wide.limits.coverage = 0.05;
  EXPECT_EQ(TuneTrials(wide).run(c).state, TrialState::fits);
}

TEST(TuneTrials, ADeckThatFitsStaysAsItIs) {
  Config base = deck();
  base.recompute.mode = Recompute::selective, base.recompute.layers = 3;
  const TuneInput free = input(base, 2, kMixed);
  Candidate own = deck_plan(base);
  own.mesh.dp = 2, own.method = Batching::packed, own.capacity = 1024;
  const Trial as_it_is = TuneTrials(free).run(own);
  ASSERT_EQ(as_it_is.state, TrialState::fits) << as_it_is.words;
  TuneInput in = free;
  in.limits.memory_bytes = static_cast<double>(as_it_is.bytes);
  TuneTrials trials(in);
  const Trial lightest = trials.lightest(own), better = trials.better_as_it_is(lightest, own);
  ASSERT_EQ(better.state, TrialState::fits);
  EXPECT_LE(better.step_s, as_it_is.step_s);
  EXPECT_LE(better.step_s, lightest.step_s);
  EXPECT_GT(better.planned, lightest.planned);
  Trial none = lightest;
  none.state = TrialState::over_memory;
  EXPECT_EQ(trials.better_as_it_is(none, own).step_s, as_it_is.step_s);
}

}  // namespace
}  // namespace ballast
