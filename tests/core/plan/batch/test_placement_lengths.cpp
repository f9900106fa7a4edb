// What placement gains on the lengths of a long-context training mix: 32 ranks, 524,288 tokens a
// step, the costs of inputs/hbp/table5.toml with exchanges and hops priced.  BALLAST_LENGTHS names
// a file of lengths, one a line (ProLong's in the project's own measurements); without it a
// distribution of the same shape is drawn.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>

#include "core/data/sampler_window.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/placement.hpp"
#include "core/plan/batch/rivals/dynamic_cp.hpp"
#include "core/plan/batch/rivals/flexsp.hpp"
#include "tests/core/plan/batch/long_tailed_lengths.hpp"
#include "tests/core/plan/batch/placement_splits.hpp"

namespace ballast {
namespace {

constexpr int kRanks = 32, kSteps = 120;
constexpr std::int64_t kStepTokens = 524288, kLongest = 131072, kRankTokens = 16384;

std::vector<std::int64_t> all_lengths() {
  std::vector<std::int64_t> lengths;
  if (const char* path = std::getenv("BALLAST_LENGTHS")) {
    std::ifstream file(path);
    for (std::int64_t n = 0; file >> n;) lengths.push_back(std::min(n, kLongest));
  }
  return lengths.empty() ? long_tailed_lengths(70000) : lengths;
}

using Steps = std::vector<std::vector<SampleLength>>;

Steps steps_of(const std::vector<std::int64_t>& lengths, std::int64_t window) {
  WindowOptions options;
  options.steps = window;
  options.global_tokens = kStepTokens;
  options.token_pairs = 30000;
  Sampler sampler(static_cast<std::int64_t>(lengths.size()), 1, 0);
  SamplerWindow windows(options);
  SamplerPosition at;
  Steps steps;
  for (int s = 0; s < kSteps; ++s) {
    auto& step = steps.emplace_back();
    for (const std::int64_t i : windows.next(sampler, at, [&](std::int64_t sample) {
           return lengths[static_cast<std::size_t>(sample)];
         })) {
      const std::int64_t n = lengths[static_cast<std::size_t>(i)];
      step.push_back({i, n, n - 1});
    }
  }
  return steps;
}

struct Mean {
  double step_s = 0, bound_s = 0;
};

Mean placed(const Steps& steps, const PlacementOptions& options, const PlacementCosts& costs) {
  Mean mean;
  for (const auto& step : steps) {
    const Placement p = place(step, options, costs);
    mean.step_s += p.step_s / kSteps;
    mean.bound_s += p.bound_s / kSteps;
  }
  return mean;
}

template <class F>
double mean_step_s(const Steps& steps, const F& seconds) {
  double sum = 0;
  for (const auto& step : steps) sum += seconds(step);
  return sum / kSteps;
}

using PackSeconds = std::function<double(const MicroBatch&)>;

/// Every rank goes through its list and waits only for those that it shares a micro-batch with.
double step_seconds(const Batch& batch, const PackSeconds& seconds) {
  std::vector<double> clock(batch.micro_batches.size(), 0.0);
  std::size_t rounds = 0;
  for (const auto& list : batch.micro_batches) rounds = std::max(rounds, list.size());
  for (std::size_t m = 0; m < rounds; ++m)
    for (std::size_t d = 0; d < clock.size(); ++d) {
      if (m >= batch.micro_batches[d].size()) continue;
      const MicroBatch& work = batch.micro_batches[d][m];
      if (work.segments.empty()) continue;
      const auto first = clock.begin() + static_cast<std::ptrdiff_t>(d), last = first + work.sp;
      std::fill(first, last, *std::max_element(first, last) + seconds(work));
    }
  return *std::max_element(clock.begin(), clock.end());
}

double batched(const Steps& steps, const BatchingOptions& options, const PackSeconds& costs) {
  double sum = 0;
  for (std::size_t s = 0; s < steps.size(); ++s)
    sum += step_seconds(plan_batch(static_cast<std::int64_t>(s), steps[s], options), costs);
  return sum / kSteps;
}

double hbp(const Steps& steps, const PlacementCosts& costs) {
  BatchingOptions options;
  options.method = Batching::hbp;
  options.dp = kRanks;
  options.groups = {{kRankTokens, 1, -1}, {kLongest, 8, -1}};
  options.pair_cost_tokens = 1.3e-9 / 4e-5;
  return batched(steps, options, [&](const MicroBatch& m) {
    return seconds(m.segments, {m.sp, m.sp, 1}, costs, 1);
  });
}

/// Every micro-batch over sp x cp ranks, packs of the capacity that does best, heaviest first.
double fixed(const Steps& steps, int sp, int cp, const PlacementCosts& costs) {
  BatchingOptions options;
  options.method = Batching::packed;
  options.dp = kRanks / (sp * cp);
  options.pair_cost_tokens = 1.3e-9 / 4e-5;
  const PackSeconds packs = [&](const MicroBatch& m) {
    return seconds(m.segments, {1, sp, cp}, costs, 1);
  };
  double best = std::numeric_limits<double>::infinity();
  for (const std::int64_t capacity : {kRankTokens, 4 * kRankTokens, kLongest}) {
    options.micro_batch_tokens = capacity;
    best = std::min(best, batched(steps, options, packs));
  }
  return best;
}

TEST(PlacementOfLongTailedLengthsSlow, BeatsRoundsAndEveryFixedSplit) {
  const TestCosts costs;
  const std::vector<std::int64_t> lengths = all_lengths();
  const Steps steps = steps_of(lengths, 1), windows = steps_of(lengths, 8);
  PlacementOptions options;
  options.ranks = kRanks;
  options.splits = placement_splits(kRanks, 32, 8);
  options.micro_batch_tokens = kRankTokens;
  options.memory_bytes = kRankTokens;
  const Mean balanced = placed(steps, options, costs), window = placed(windows, options, costs);
  const auto row = [&](const std::string& name, double step_s) {
    std::cout << fmt::format("  {:44} {:7.3f} s {:6.3f} x balanced {:6.3f} x bound\n", name, step_s,
                             step_s / balanced.step_s, step_s / balanced.bound_s);
  };
  row("bound: all samples on one rank each, / ranks", balanced.bound_s);
  row("balanced", balanced.step_s);
  std::cout << fmt::format("  {:44} {:7.3f} s {:6.3f} x its bound\n", "balanced, window of 8 steps",
                           window.step_s, window.step_s / window.bound_s);
  const double flexsp = mean_step_s(
      steps, [&](const auto& step) { return flexsp_placement(step, options, costs).step_s; });
  row("FlexSP-like", flexsp);
  const double by_length = mean_step_s(
      steps, [&](const auto& step) { return dynamic_cp_placement(step, options, costs).step_s; });
  row("dynamic CP, by length (Megatron-like)", by_length);
  const double rounds = hbp(steps, costs);
  row("hbp, groups 16K x 1 and 128K x 8", rounds);
  double best = std::numeric_limits<double>::infinity();
  for (const int sp : {1, 2, 4, 8, 16, 32})
    for (const int cp : {1, 2, 4, 8, 16, 32}) {
      if (sp * cp < 8 || sp * cp > kRanks) continue;
      const double step_s = fixed(steps, sp, cp, costs);
      row(fmt::format("fixed sp {} cp {}", sp, cp), step_s);
      best = std::min(best, step_s);
    }
  // What trains: the same placement as lists of rounds, groups aligned, Ulysses alone.
  BatchingOptions trained;
  trained.method = Batching::balanced;
  trained.dp = kRanks;
  trained.micro_batch_tokens = kRankTokens;
  trained.splits.clear();
  for (int ranks = 1; ranks <= kRanks; ranks *= 2) trained.splits.push_back({ranks, ranks, 1});
  trained.placement_costs = std::make_shared<TestCosts>(costs);
  const double lists = batched(steps, trained, [&](const MicroBatch& m) {
    return seconds(m.segments, {m.sp, m.sp, 1}, costs, 1);
  });
  row("balanced as `train` runs it: Ulysses groups", lists);
  EXPECT_LE(lists, 1.02 * balanced.step_s);
  EXPECT_GE(rounds, 1.35 * lists);
  EXPECT_GE(best, 1.10 * lists);
  EXPECT_GT(flexsp, balanced.step_s);
  EXPECT_GT(by_length, balanced.step_s);
  EXPECT_LE(window.step_s, 1.05 * window.bound_s);
}

}  // namespace
}  // namespace ballast
