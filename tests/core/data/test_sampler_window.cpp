// Windows of steps: every sample once an epoch, the same steps wherever a run stops, W = 1 the
// sampler itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/data/sampler_window.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kSamples = 3001;

/// Long-tailed lengths, some samples empty.
std::int64_t length(std::int64_t sample) {
  const double u = random_uniform(11, 1, static_cast<std::uint64_t>(sample));
  return sample % 500 == 3 ? 0 : static_cast<std::int64_t>(400 / std::pow(1 - u * 0.9999, 0.7));
}

WindowOptions options(std::int64_t steps) {
  WindowOptions o;
  o.steps = steps;
  o.global_tokens = 60000;
  o.token_pairs = 20000;
  return o;
}

TEST(SamplerWindow, OneStepIsTheSampler) {
  Sampler sampler(kSamples, 5, 0.1), same(kSamples, 5, 0.1);
  SamplerWindow window(options(1));
  SamplerPosition a, b;
  for (int step = 0; step < 200; ++step) {
    ASSERT_EQ(window.next(sampler, a, length), same.next(b, 60000, 0, length));
    ASSERT_EQ(a, b);
  }
  EXPECT_GE(a.epoch, 2);
}

TEST(SamplerWindow, EverySampleComesOnceAnEpoch) {
  for (const WindowRule rule : {WindowRule::balanced, WindowRule::sorted})
    for (const bool count : {false, true}) {
      WindowOptions o = options(8);
      o.rule = rule;
      if (count) o.global_samples = 100;
      // Whole epochs: a step that goes on in the next epoch takes what windowless training does.
      Sampler sampler(count ? 3000 : kSamples, 5, 0), plain(count ? 3000 : kSamples, 5, 0);
      SamplerWindow window(o);
      SamplerPosition a, b;
      std::multiset<std::int64_t> mine, theirs;
      std::size_t steps = 0;
      while (a.epoch < 2) {
        const auto step = window.next(sampler, a, length);
        EXPECT_TRUE(!count || step.size() == 100);
        mine.insert(step.begin(), step.end());
        ++steps;
      }
      for (std::size_t s = 0; s < steps; ++s)
        for (const std::int64_t i : plain.next(b, o.global_tokens, o.global_samples, length))
          theirs.insert(i);
      EXPECT_EQ(mine, theirs);
      EXPECT_EQ(a, b);
      if (count) {
        for (std::int64_t i = 0; i < 3000; ++i) ASSERT_EQ(mine.count(i), 2u);
      }
    }
}

TEST(SamplerWindow, ARunThatStopsAnywhereGoesOnAlike) {
  const WindowOptions o = options(8);
  Sampler sampler(kSamples, 5, 0);
  SamplerWindow window(o);
  SamplerPosition at;
  for (int step = 0; step < 60; ++step) {
    SamplerPosition other = at;  // of a checkpoint, read by a program that knows nothing else
    Sampler fresh_sampler(kSamples, 5, 0);
    SamplerWindow fresh(o);
    const auto expected = window.next(sampler, at, length);
    ASSERT_EQ(fresh.next(fresh_sampler, other, length), expected) << step;
    ASSERT_EQ(other, at);
  }
}

// Which step of a window has the longest samples is drawn anew in every epoch.
TEST(SamplerWindow, EveryEpochDealsItsWindowsInAnotherOrder) {
  WindowOptions o = options(4);
  o.rule = WindowRule::sorted;
  o.global_samples = 1;
  std::set<std::vector<std::int64_t>> orders;
  for (std::int64_t epoch = 0; epoch < 6; ++epoch) {
    Sampler sampler(4, 5, 0);
    SamplerWindow window(o);
    SamplerPosition at;
    at.epoch = epoch;
    std::vector<std::int64_t> order;
    for (int step = 0; step < 4; ++step)
      order.push_back(window.next(sampler, at, [](std::int64_t i) { return 100 * (i + 1); }).at(0));
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 2u);
}

TEST(SamplerWindow, AnotherWindowIsRefusedInsideOne) {
  Sampler sampler(kSamples, 5, 0);
  SamplerWindow eight(options(8)), four(options(4));
  SamplerPosition at;
  eight.next(sampler, at, length);
  EXPECT_EQ(at, (SamplerPosition{0, 0, 1, 8}));
  EXPECT_THROW(four.next(sampler, at, length), Error);
  for (int step = 1; step < 8; ++step) eight.next(sampler, at, length);
  EXPECT_EQ(at.window_step, 0);
  EXPECT_GT(at.index, 0);
  EXPECT_FALSE(four.next(sampler, at, length).empty());
  EXPECT_THROW(SamplerWindow(options(0)), Error);
}

TEST(SamplerWindow, WindowsEndWhereTheCurriculumDoes) {
  Curriculum curriculum;
  curriculum.steps = 11;
  curriculum.max_tokens = 900;
  curriculum.global_tokens = 60000;
  Sampler sampler(kSamples, 5, 0);
  sampler.begin_with(curriculum, length);
  ASSERT_EQ(sampler.short_steps(), 11);
  SamplerWindow window(options(8));
  SamplerPosition at;
  for (int step = 0; step < 11; ++step)
    for (const std::int64_t i : window.next(sampler, at, length)) EXPECT_LE(length(i), 900);
  EXPECT_EQ(at, (SamplerPosition{0, sampler.short_samples(), 0, 0}));
}

double work(const std::vector<std::int64_t>& step) {
  double sum = 0;
  for (const std::int64_t i : step) {
    const double n = static_cast<double>(length(i));
    sum += 20000 * n + n * (n + 1) / 2;
  }
  return sum;
}

TEST(SamplerWindow, StepsOfAWindowDoEqualWork) {
  Sampler sampler(kSamples, 5, 0);
  SamplerWindow plain(options(1)), window(options(8));
  const auto spread = [&](SamplerWindow& w) {
    SamplerPosition at;
    double low = 1e300, high = 0;
    for (int step = 0; step < 8; ++step) {
      const double x = work(w.next(sampler, at, length));
      low = std::min(low, x), high = std::max(high, x);
    }
    return high / low;
  };
  EXPECT_LT(spread(window), 1.01);
  EXPECT_GT(spread(plain), 1.1);
}

TEST(SamplerWindow, SortedStepsHoldNeighbours) {
  WindowOptions o = options(8);
  o.rule = WindowRule::sorted;
  Sampler sampler(kSamples, 5, 0);
  SamplerWindow window(o);
  SamplerPosition at;
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
  for (int step = 0; step < 8; ++step) {
    const auto samples = window.next(sampler, at, length);
    std::int64_t low = 1 << 30, high = 0;
    for (const std::int64_t i : samples)
      low = std::min(low, length(i)), high = std::max(high, length(i));
    ranges.emplace_back(low, high);
  }
  EXPECT_FALSE(std::is_sorted(ranges.begin(), ranges.end()));
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t s = 1; s < ranges.size(); ++s) EXPECT_GE(ranges[s].first, ranges[s - 1].second);
}

}  // namespace
}  // namespace ballast
