// The search of `ballast tune` against trying everything.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/base/error.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/plan_step.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/search/tune.hpp"
#include "core/search/tune_reasons.hpp"
#include "tests/core/search/tune_decks.hpp"

namespace ballast {
namespace {

/// Every candidate with everything that saves memory.
std::vector<Trial> all_trials(const TuneInput& in) {
  TuneTrials trials(in);
  std::vector<Trial> list;
  for (Candidate c : tune_space(in.base, in.limits.ranks, in.longest.tokens, {0}).candidates)
    for (const RecomputeOptions& recompute : recompute_choices(in.base))
      for (const Offload offload : offload_choices(in.base, c.method))
        for (const int zero : zero_choices(in.base)) {
          c.recompute = recompute, c.offload = offload, c.zero = zero;
          list.push_back(trials.run(c));
        }
  return list;
}

double fastest(const std::vector<Trial>& list, double most_bytes) {
  double best = 1e300;
  for (const Trial& t : list)
    if (t.state == TrialState::fits && static_cast<double>(t.bytes) <= most_bytes)
      best = std::min(best, t.first_step_s);
  return best;
}

/// Held where the whole product would take too long.
Config small_space() {
  Config base = deck();
  base.batching.micro_batch_tokens = 1024;
  hold(base, {"batching.micro_batch_tokens", "chunk.k", "ring.layout", "chunk.tokens"});
  base.chunk.tokens = 512;
  base.ring.layout = LayoutKind::document_zigzag;
  return base;
}

TEST(TuneSlow, FindsWhatTryingEverythingFinds) {
  TuneInput in = input(small_space(), 4, kMixed);
  const std::vector<Trial> all = all_trials(in);
  ASSERT_GT(all.size(), 200u);
  const TuneResult found = tune(in, {.list = 3, .steps = 1, .trials = 100000, .threads = 1});
  ASSERT_FALSE(found.best.empty());
  EXPECT_EQ(found.left, 0);
  EXPECT_NEAR(found.best.front().first_step_s, fastest(all, 1e300), 1e-12);
  EXPECT_GT(found.bounded, 0) << "no candidate was pruned, so this shows nothing of pruning";
}

TEST(TuneSlow, KeepsWithinMemory) {
  TuneInput in = input(small_space(), 4, kMixed);
  const std::vector<Trial> all = all_trials(in);
  std::int64_t least = INT64_MAX, most = 0;
  for (const Trial& t : all)
    if (t.state == TrialState::fits)
      least = std::min(least, t.bytes), most = std::max(most, t.bytes);
  ASSERT_LT(least, most);
  for (const double share : {0.02, 0.1, 0.3}) {
    in.limits.memory_bytes = static_cast<double>(least) + share * static_cast<double>(most - least);
    const TuneResult found = tune(in, {.list = 3, .steps = 1, .trials = 100000, .threads = 1});
    ASSERT_FALSE(found.best.empty()) << share;
    for (const Trial& t : found.best)
      EXPECT_LE(static_cast<double>(t.bytes), in.limits.memory_bytes) << describe(t.candidate);
    // Layers may be recomputed in part too, which is not in the list of all.
    EXPECT_LE(found.best.front().first_step_s, fastest(all, in.limits.memory_bytes) * (1 + 1e-9))
        << share;
  }
  in.limits.memory_bytes = 1000;
  const TuneResult none = tune(in, {.list = 3, .steps = 1, .trials = 100, .threads = 1});
  EXPECT_TRUE(none.best.empty());
  EXPECT_GT(none.too_large, 0);
  EXPECT_EQ(none.trials, 0);  // what a rank holds whatever it computes is too much
  EXPECT_NE(nothing_fits(none, in.limits).find("fits 0.98 KiB a rank"), std::string::npos)
      << nothing_fits(none, in.limits);
}

TEST(TuneSlow, StepsInTurnFitTooWhatNoneAloneNeeds) {
  Config base = small_space();
  TuneInput in = input(base, 4, kMixed);
  in.steps.resize(4);
  for (std::size_t s = 0; s < in.steps.size(); ++s) {
    in.steps[s].clear();  // other lengths in every step: pools take the largest of each
    for (std::int64_t i = 0; i < 12; ++i) {
      const std::int64_t tokens = 64 + (i * 131 + static_cast<std::int64_t>(s) * 379) % 900;
      in.steps[s].push_back({i, tokens, tokens});
    }
  }
  in.longest = {0, 964, 0};
  TuneTrials trials(in);
  const TuneResult found = tune(in, {.list = 20, .steps = 4, .trials = 100000, .threads = 1});
  ASSERT_FALSE(found.best.empty());
  std::int64_t grew = 0;
  const Trial* most = nullptr;
  for (const Trial& t : found.best) {
    EXPECT_EQ(t.bytes, trials.in_turn(t).bytes) << describe(t.candidate);
    const std::int64_t alone = trials.more(trials.run(t.candidate), 4).bytes;
    EXPECT_GE(t.bytes, alone);
    if (t.bytes - alone > grew) grew = t.bytes - alone, most = &t;
  }
  ASSERT_NE(most, nullptr) << "pools never grew, so this shows nothing";
  // Longer than all that is trained.
  in.evaluated = {{{0, 2000, 2000}, {1, 2000, 2000}}};
  const std::int64_t evaluated = trials.in_turn(*most).bytes;
  EXPECT_GT(evaluated, most->bytes);
  in.evaluated.push_back({{0, 3000, 1}});  // a text
  EXPECT_GT(trials.in_turn(*most).bytes, evaluated);
  in.evaluated.clear();
  in.drifting = {{0, 3000, 3000}};
  EXPECT_GT(trials.in_turn(*most).bytes, most->bytes);
  in.drifting.clear();
  in.limits.memory_bytes = static_cast<double>(most->bytes - 1);  // between the two
  for (const std::int64_t list : {1, 20}) {
    const TuneResult fit = tune(in, {.list = list, .steps = 4, .trials = 100000, .threads = 1});
    ASSERT_FALSE(fit.best.empty()) << "slower plans stand in for those that are too large";
    for (const Trial& t : fit.best)
      EXPECT_LE(static_cast<double>(t.bytes), in.limits.memory_bytes) << describe(t.candidate);
  }
}

// A second step that needs more memory than the first takes heavier recomputation, not the plan.
TEST(Tune, LaterStepsTakeWhatSavesMemory) {
  Config base = small_space();
  TuneInput in = input(base, 4, kMixed);
  in.steps.resize(2);
  in.steps[0] = {{0, 64, 64}, {1, 64, 64}};
  in.steps[1].clear();
  for (std::int64_t i = 0; i < 12; ++i) in.steps[1].push_back({i, 500, 500});
  in.longest = {0, 64, 64};
  Candidate c;
  c.method = Batching::packed, c.capacity = 2048, c.mesh.dp = 4;
  TuneTrials free(in);
  const std::int64_t first = free.run(c).bytes, second = free.more(free.run(c), 2).bytes;
  c.recompute.mode = Recompute::full;
  const std::int64_t least = free.more(free.run(c), 2).bytes;
  c.recompute.mode = Recompute::none;
  ASSERT_LT(first, least);
  ASSERT_LT(least, second);
  in.limits.memory_bytes = static_cast<double>(least) * 1.001;
  TuneTrials trials(in);
  const Trial light = trials.lightest(c);
  EXPECT_EQ(light.candidate.recompute.mode, Recompute::none);
  EXPECT_EQ(trials.more(light, 2).state, TrialState::over_memory);
  for (const bool in_turn : {false, true}) {
    const Trial found = trials.longer(light, 2, in_turn);
    ASSERT_EQ(found.state, TrialState::fits);
    EXPECT_EQ(found.steps, 2);
    EXPECT_NE(found.candidate.recompute.mode, Recompute::none);
  }
  in.limits.memory_bytes = static_cast<double>(first);
  EXPECT_EQ(TuneTrials(in).longer(light, 2, true).state, TrialState::over_memory);
}

// More lanes than are replayed one by one: the one with the longest micro-batch, one with four long
// ones, which its first stage holds at once, one with the most tokens, and short ones.
TEST(Tune, TheLaneWithMostInFlightIsReplayed) {
  Config base = small_space();
  base.batching.method = Batching::none;
  TuneInput in = input(base, 36, {512});
  in.steps.resize(1);
  in.steps[0].clear();
  for (std::int64_t round = 0; round < 40; ++round)
    for (std::int64_t lane = 0; lane < 9; ++lane) {
      const bool long_one = (lane == 0 && round == 0) || (lane == 1 && round < 4);
      const std::int64_t tokens = long_one ? 512 - 32 * lane : lane == 2 ? 64 : 2;
      in.steps[0].push_back({9 * round + lane, tokens, tokens});
    }
  Candidate c;
  c.method = Batching::none, c.capacity = 512, c.mesh.dp = 9, c.mesh.pp = 4;
  const Trial trial = TuneTrials(in).run(c);
  ASSERT_EQ(trial.state, TrialState::fits) << trial.words;
  const Config config = with(base, c);
  const RunOptions options = RunOptions::from(config);
  const SimulationOptions simulation = simulation_options(config, options);
  const auto costs = in.costs(config);
  const StepPlan plan =
      plan_step(0, in.steps[0], step_options(config, options, simulation, *costs));
  const std::vector<StageMemory> stages = stage_memories(config, options);
  std::vector<std::int64_t> bytes;
  for (int d = 0; d < 9; ++d) {
    bytes.push_back(0);
    for (std::size_t s = 0; s < stages.size(); ++s)
      bytes.back() =
          std::max(bytes.back(), replay_memory(stages[s], lane_work(plan, d)[s]).total());
  }
  EXPECT_EQ(std::max_element(bytes.begin(), bytes.end()) - bytes.begin(), 1);
  EXPECT_EQ(trial.bytes, bytes[1]);
}

TEST(Tune, ChunksAreAllKeptAtTheLargestK) {
  Config base = deck();
  base.batching.method = Batching::chunkflow;
  hold(base, {"batching.method"});
  std::map<std::int64_t, int> largest;  // K, by the tokens of a chunk
  for (const Candidate& c : tune_space(base, 1, 2048, {0}).candidates)
    largest[c.capacity] = std::max(largest[c.capacity], static_cast<int>(c.chunk_k));
  EXPECT_GT(largest.size(), 3u);
  for (const auto& [tokens, k] : largest) {
    const std::int64_t chunks = (2048 + tokens - 1) / tokens;
    EXPECT_GE(k, std::min<std::int64_t>(chunks, 16)) << tokens;
    EXPECT_LT(k, 2 * chunks) << tokens;
  }
}

TEST(Tune, SamplesAreNotCutFinerThanTheLeastTokensOfARank) {
  std::int64_t finest = 0;
  for (const Candidate& c : tune_space(deck(), 64, 2048, {0}).candidates)
    finest = std::max<std::int64_t>(finest, c.mesh.sp * c.ring());
  EXPECT_EQ(finest, 32) << "a block of 64 tokens a rank";
}

// Where all stages fit, the one whose sums, update and gathers take least.
TEST(Tune, TakesTheQuickestZeroStage) {
  TuneInput in = input(small_space(), 4, kMixed);
  in.costs = [](const Config& config) {
    WorkShape work = work_shape(config, nullptr);
    return std::make_shared<RateCosts>(device_rates(DeviceKind::h200), work);
  };
  Candidate c;
  c.method = Batching::packed, c.capacity = 2048, c.mesh.dp = 4;
  TuneTrials trials(in);
  const Trial found = trials.lightest(c);
  std::set<double> seconds;
  for (const int zero : zero_choices(in.base)) {
    c.zero = zero;
    const Trial other = trials.run(c);
    EXPECT_LE(found.step_s, other.step_s * (1 + 1e-12)) << zero;
    seconds.insert(other.step_s);
  }
  EXPECT_GT(seconds.size(), 1u);
}

TEST(Tune, ReasonsNameWhatIsWaitedFor) {
  Trial slower, faster;
  slower.terms.bubble_s = 2, slower.candidate.mesh.pp = 2;
  slower.load_balance = 0.92;
  EXPECT_EQ(largest_difference(slower, faster), "pipeline bubble +2 s");
  slower.load_balance = 0.7;
  EXPECT_EQ(largest_difference(slower, faster),
            "waits for the slowest rank (load balance 0.70) +2 s");
  slower.load_balance = 0.92, slower.candidate.mesh.pp = 1;
  EXPECT_EQ(largest_difference(slower, faster),
            "waits for the slowest rank (load balance 0.92) +2 s");
  slower.idle_ranks = 3;
  EXPECT_EQ(largest_difference(slower, faster), "waits (3 idle ranks) +2 s");
  EXPECT_EQ(largest_difference(faster, faster), "nothing of the first step takes longer");
  slower.first_step_s = 3, faster.first_step_s = 5, faster.terms.compute_s = 4;
  faster.terms.bubble_s = 2 - 1e-9;
  EXPECT_EQ(largest_difference(slower, faster), "nothing of the first step takes longer");
}

TEST(Tune, GroupsKeepTheLayersThatTheyRecompute) {
  Config base = deck();
  Candidate c;
  c.method = Batching::hbp, c.mesh.dp = 4, c.groups = {{512, 1, 2}, {2048, 4, -1}};
  EXPECT_EQ(pack_groups(with(base, c)), c.groups);
  EXPECT_NE(describe(c).find("512/1 (recompute 2) 2048/4,"), std::string::npos) << describe(c);
  c.groups.front().recompute_layers = -1;
  EXPECT_EQ(pack_groups(with(base, c)), c.groups);
  EXPECT_TRUE(with(base, c).batching.group_recompute.empty());
}

TEST(Tune, CostsDecide) {
  // One sample: all ranks are of use only where they share it.
  Config base = deck();
  base.batching.method = Batching::packed;
  hold(base, {"batching.method", "mesh.pp"});
  const std::vector<std::int64_t> one{2048};
  base.costs.exchange_token_s = 0, base.costs.ring_hop_token_s = 1e-3;
  EXPECT_EQ(tune(input(base, 4, one)).best.front().candidate.mesh.sp, 4);
  base.costs.exchange_token_s = 1e-3, base.costs.ring_hop_token_s = 0;
  const TuneResult rings = tune(input(base, 4, one));
  EXPECT_EQ(rings.best.front().candidate.ring(), 4);
  const std::vector<Loss> lost = losses(rings, {});
  const auto sp =
      std::find_if(lost.begin(), lost.end(), [](const Loss& l) { return l.choice == "sp 4"; });
  ASSERT_NE(sp, lost.end());
  EXPECT_NE(sp->why.find("exchange"), std::string::npos) << sp->why;
  EXPECT_GT(sp->slower, 1);
}

TEST(Tune, StatedCostsFollowTheStages) {
  // A stage's seconds are stated: with half the layers it takes half of them.
  Config base = deck();
  Candidate c;
  c.mesh.pp = 2, c.capacity = 512;
  EXPECT_DOUBLE_EQ(with(base, c).costs.forward_token_s, 0.5e-5);
  EXPECT_DOUBLE_EQ(with(base, c).costs.forward_pair_s, 0.5e-8);
  c.mesh.pp = 1;
  EXPECT_DOUBLE_EQ(with(base, c).costs.forward_token_s, 1e-5);
}

TEST(TuneSlow, CommandLineHoldsKeys) {
  Config base = deck();
  base.mesh.pp = 2, base.optimizer.zero = 0;
  hold(base, {"mesh.pp", "optimizer.zero"});
  const TuneResult found = tune(input(base, 4, kMixed), {.steps = 1});
  for (const Trial& t : found.best) {
    EXPECT_EQ(t.candidate.mesh.pp, 2);
    EXPECT_EQ(t.candidate.zero, 0);
    EXPECT_EQ(t.candidate.mesh.size(), 4);
  }
  base.mesh.dp = 3;
  hold(base, {"mesh.dp"});
  EXPECT_THROW(tune(input(base, 4, kMixed)), Error);
}

TEST(Tune, ChunksOfTheCommandLineAreHeld) {
  Config base = deck();
  base.chunk.search_tokens = {256, 1024};
  const auto chunks = [&] {
    std::set<std::int64_t> seen;
    for (const Candidate& c : tune_space(base, 2, 2048, {0}).candidates)
      if (c.method == Batching::chunkflow) seen.insert(c.capacity);
    return seen;
  };
  EXPECT_EQ(chunks(), (std::set<std::int64_t>{256, 1024}));
  base.chunk.tokens = 512;
  hold(base, {"chunk.tokens"});
  EXPECT_EQ(chunks(), (std::set<std::int64_t>{512}));
}

// The deck's plan is tried before all that promise more.
TEST(Tune, IsNeverSlowerThanTheDeck) {
  Config base = deck();
  base.mesh.dp = 2, base.mesh.cp_inner = 2;
  base.batching.method = Batching::lbb, base.batching.micro_batch_tokens = 1000;
  base.costs.exchange_token_s = 1e-3;
  TuneInput in = input(base, 4, kMixed);
  const Candidate own = deck_plan(base);
  const Trial as_it_is = TuneTrials(in).more(TuneTrials(in).run(own), 2);
  ASSERT_EQ(as_it_is.state, TrialState::fits) << as_it_is.words;
  for (const std::int64_t trials : {1, 20}) {
    const TuneResult found = tune(in, {.list = 2, .steps = 2, .trials = trials, .threads = 1});
    ASSERT_FALSE(found.best.empty());
    EXPECT_LE(found.best.front().step_s, as_it_is.step_s * (1 + 1e-12));
    if (trials == 1) {
      EXPECT_TRUE(same_choices(found.best.front().candidate, own));
    }
  }
}

TEST(TuneSlow, TunedBudgetsThatAreListedKeepTheCoverage) {
  Config base = deck();
  base.attention.pattern = PatternKind::moba;
  base.attention.moba_block = 64, base.attention.moba_top_k = 16;
  base.dst.enabled = true, base.dst.anchor = Anchor::min;
  base.dst.threshold = 0.3, base.dst.base_budget = 16, base.dst.simulated_coverage = {8};
  base.from.settings["dst.enabled"] = {Origin::file, "deck.toml:2"};
  TuneInput in = input(base, 2, {4096, 2048, 700, 64});
  in.limits.coverage = 0.9;
  const TuneResult found = tune(in, {.list = 5, .steps = 1, .trials = 32, .threads = 1});
  ASSERT_FALSE(found.best.empty());
  for (const Trial& t : found.best)
    EXPECT_GE(t.covered, 0.9 * t.covered_of) << describe(t.candidate);
  EXPECT_GT(found.refused, 0) << "no trial lost coverage, so this shows nothing";
}

TEST(Tune, NoMoreTrialsThanStated) {
  const TuneInput in = input(deck(), 4, kMixed);
  for (const std::int64_t trials : {1, 5, 20})
    EXPECT_EQ(tune(in, {.list = 2, .steps = 1, .trials = trials, .threads = 1}).trials, trials);
}

// Neither recomputation nor the stage of ZeRO is to blame.
TEST(Tune, RefusalsAreOfTheChoicesThatWereLookedAt) {
  Config base = deck();
  base.batching.method = Batching::balanced;
  base.batching.select_ranks = {1, 2};
  hold(base, {"batching.method", "batching.select_ranks"});
  const TuneResult found =
      tune(input(base, 4, kMixed), {.list = 2, .steps = 1, .trials = 20, .threads = 1});
  ASSERT_GT(found.refused, 0);
  for (const auto& [facet, facts] : found.choices)
    if (facet.first == "zero" || facet.first == "recompute") {
      EXPECT_EQ(facts.refused, "") << facet.first << " " << facet.second;
    }
}

TEST(TuneSlow, IsTheSameOnAnyNumberOfThreads) {
  TuneInput in = input(deck(), 8, kMixed);
  const TuneOptions one{.list = 5, .steps = 2, .trials = 60, .threads = 1};
  TuneOptions three = one;
  three.threads = 3;
  const TuneResult a = tune(in, one), b = tune(in, three);
  ASSERT_EQ(a.best.size(), b.best.size());
  EXPECT_EQ(a.trials, b.trials);
  for (std::size_t i = 0; i < a.best.size(); ++i) {
    EXPECT_EQ(describe(a.best[i].candidate), describe(b.best[i].candidate));
    EXPECT_EQ(a.best[i].step_s, b.best[i].step_s);
  }
}

TEST(TuneSlow, EndsInTime) {
  const TuneInput in = input(deck(), 8, kMixed);
  const TuneResult whole = tune(in, {.list = 3, .steps = 2}),
                   hurried = tune(in, {.list = 3, .steps = 2, .seconds = 1e-6}),
                   stated = tune(in, {.list = 3, .steps = 2, .trials = 40, .seconds = 1e-6});
  EXPECT_FALSE(whole.cut_short);
  EXPECT_FALSE(stated.cut_short);  // who says how many gets as many
  EXPECT_GE(stated.trials, 40);
  // The first trials, a plan of every promising choice, come before anybody knows how long they
  // take; all that are listed have as many steps.
  EXPECT_TRUE(hurried.cut_short);
  EXPECT_LT(hurried.trials, whole.trials);
  ASSERT_EQ(hurried.best.size(), 3u);
  for (const Trial& t : hurried.best) EXPECT_EQ(t.steps, 1);
  for (const Trial& t : whole.best) EXPECT_EQ(t.steps, 2);
}

TEST(TuneSlow, SaysWhatTheTableOfCombinationsRefuses) {
  Config base = deck();
  base.batching.method = Batching::balanced;
  base.batching.select_ranks = {1, 2};
  hold(base, {"batching.method", "batching.select_ranks"});
  const TuneResult found = tune(input(base, 4, kMixed), {.steps = 1});
  EXPECT_GT(found.refused, 0);
  bool any = false;
  for (const auto& [facet, facts] : found.choices)
    any = any || facts.refused.find("groups join data-parallel ranks") != std::string::npos;
  EXPECT_TRUE(any);
}

// Budgets that take the longest sample whole route nothing, so that only those stay.
TEST(Tune, BudgetsThatNoGpuCanRouteAreLeftOut) {
  constexpr std::int64_t kTokens = 64 * 4096;
  Config base = deck();
  base.run.backend = Backend::cuda, base.model.head_dim = 64;
  base.attention.pattern = PatternKind::moba;
  base.attention.moba_block = 64, base.attention.moba_top_k = 2048;
  TuneInput in = input(base, 1, {kTokens});
  in.longest_document = kTokens;
  const TuneOptions options{.list = 2, .steps = 1, .trials = 4, .threads = 1};
  EXPECT_THROW(tune(in, options), Error);
  in.limits.coverage = 0.01;
  const TuneResult found = tune(in, options);
  ASSERT_FALSE(found.best.empty()) << nothing_fits(found, in.limits);
  for (const Trial& t : found.best) EXPECT_GE(t.candidate.budget, 4096);
  const ChoiceFacts& left = found.choices.at({"budget", "2048"});
  EXPECT_EQ(left.candidates, 0);
  EXPECT_NE(left.refused.find("4096 blocks of 64 keys"), std::string::npos) << left.refused;
}

TEST(Tune, BudgetsReachTheCoverage) {
  Config base = deck();
  base.attention.pattern = PatternKind::moba;
  base.attention.moba_block = 64, base.attention.moba_top_k = 16;
  const std::vector<SampleLength> samples{{0, 4096, 4096}, {1, 1024, 1024}};
  EXPECT_EQ(covering_budgets(base, samples, 0), std::vector<std::int64_t>{0});
  const auto few = covering_budgets(base, samples, 0.5),
             many = covering_budgets(base, samples, 0.95);
  ASSERT_FALSE(many.empty());
  EXPECT_LT(few.front(), many.front());
  EXPECT_THROW(covering_budgets(base, {{0, 1 << 20, 0}}, 0.999), Error);
  // A budget of the command line stays, or is refused.
  ASSERT_GT(few.size(), 1u);
  ASSERT_LT(few.front(), 16);
  hold(base, {"attention.moba_top_k"});
  EXPECT_EQ(covering_budgets(base, samples, 0.5), std::vector<std::int64_t>{16});
  base.attention.moba_top_k = 1;
  EXPECT_THROW(covering_budgets(base, samples, 0.95), Error);
}

}  // namespace
}  // namespace ballast
