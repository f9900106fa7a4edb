// Metrics: worked examples of the papers, bounds on random data, and exclusive times against a slow
// reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/base/error.hpp"
#include "core/observe/metrics.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

using Times = std::vector<std::vector<double>>;

TEST(Metrics, ImbalanceDegreeIsMaxOverMean) {
  EXPECT_DOUBLE_EQ(imbalance_degree(std::vector<double>{1, 2, 3}), 1.5);
  EXPECT_DOUBLE_EQ(imbalance_degree(std::vector<double>{4}), 1);
  EXPECT_DOUBLE_EQ(imbalance_degree(std::vector<double>{}), 1);
  EXPECT_DOUBLE_EQ(imbalance_degree(std::vector<double>{0, 0}), 1);
}

TEST(Metrics, RingImbalanceByHand) {
  // Steps (columns): 1.5 and 1.  Workers (rows): 4/3 and 1.5... written out below.
  const Times times = {{1, 2}, {3, 2}};
  EXPECT_DOUBLE_EQ(worker_imbalance(times), (3 / 2.0 + 2 / 2.0) / 2);
  EXPECT_DOUBLE_EQ(step_imbalance(times), (2 / 1.5 + 3 / 2.5) / 2);
  EXPECT_DOUBLE_EQ(computation_ratio(times, {{2, 4}, {3, 8}}), (0.5 + 0.5 + 1 + 0.25) / 4);
  EXPECT_DOUBLE_EQ(computation_ratio(times, {{2, 0}, {3, 8}}), (0.5 + 1 + 0.25) / 3);
}

TEST(Metrics, EmptyRingsAreBalanced) {
  for (const Times& times : {Times{}, Times{{}, {}}, Times{{0, 0}, {0, 0}}}) {
    EXPECT_DOUBLE_EQ(worker_imbalance(times), 1);
    EXPECT_DOUBLE_EQ(step_imbalance(times), 1);
    EXPECT_DOUBLE_EQ(computation_ratio(times, times), 1);
  }
}

TEST(Metrics, IdleWorkersCount) {
  EXPECT_DOUBLE_EQ(computation_ratio({{1}, {0}}, {{1}, {1}}), 0.5);
}

TEST(Metrics, RaggedRingsAreRefused) {
  EXPECT_THROW(worker_imbalance({{1, 2}, {3}}), Error);
  EXPECT_THROW(step_imbalance({{1, 2}, {3}}), Error);
  EXPECT_THROW(computation_ratio({{1, 2}}, {{1}}), Error);
  EXPECT_THROW(computation_ratio({{1, 2}}, {{1, 2}, {1, 2}}), Error);
}

TEST(Metrics, BalanceRatioGivesThePapersExample) {
  // HBP Equation 2: packs {2K, 2K} and {1K, 1K, 1K, 1K} on two devices, attention as the sum of
  // squared lengths.
  const double k = 1024;
  EXPECT_DOUBLE_EQ(balance_ratio(std::vector<double>{8 * k * k, 4 * k * k}), 0.25);
  EXPECT_DOUBLE_EQ(balance_ratio(std::vector<double>{5, 5, 5}), 0);
  EXPECT_DOUBLE_EQ(balance_ratio(std::vector<double>{}), 0);
  EXPECT_DOUBLE_EQ(balance_ratio(std::vector<double>{0, 0}), 0);
  EXPECT_DOUBLE_EQ(padding_ratio(std::vector<double>{4096, 2048}, 4096), 0.25);
  EXPECT_DOUBLE_EQ(padding_ratio(std::vector<double>{}, 4096), 0);
}

TEST(Metrics, PopMultipliesOut) {
  const Pop p = pop(std::vector<double>{2, 4}, 8);
  EXPECT_DOUBLE_EQ(p.load_balance, 0.75);
  EXPECT_DOUBLE_EQ(p.communication_efficiency, 0.5);
  EXPECT_DOUBLE_EQ(p.parallel_efficiency, 0.375);
  EXPECT_DOUBLE_EQ(pop(std::vector<double>{}, 1).parallel_efficiency, 1);
  EXPECT_DOUBLE_EQ(pop(std::vector<double>{0, 0}, 1).parallel_efficiency, 1);
  EXPECT_DOUBLE_EQ(pop(std::vector<double>{1}, 0).parallel_efficiency, 1);
}

TEST(Metrics, BoundsHoldOnRandomData) {
  const unsigned seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 500; ++round) {
    const std::size_t workers = 1 + random() % 8, steps = 1 + random() % 9;
    Times compute(workers, std::vector<double>(steps)), wall = compute;
    std::uniform_real_distribution<double> time(1e-6, 1);
    for (std::size_t w = 0; w < workers; ++w)
      for (std::size_t t = 0; t < steps; ++t)
        wall[w][t] = (compute[w][t] = time(random)) + time(random);
    EXPECT_GE(worker_imbalance(compute), 1);
    EXPECT_LE(worker_imbalance(compute), static_cast<double>(workers) * (1 + 1e-12));
    EXPECT_GE(step_imbalance(compute), 1);
    EXPECT_LE(step_imbalance(compute), static_cast<double>(steps) * (1 + 1e-12));
    EXPECT_GT(computation_ratio(compute, wall), 0);
    EXPECT_LT(computation_ratio(compute, wall), 1);
    // One definition seen from two sides: max / mean = 1 / (1 - balance ratio), and load balance is
    // its inverse.
    EXPECT_NEAR(imbalance_degree(compute[0]) * (1 - balance_ratio(compute[0])), 1, 1e-12);
    EXPECT_NEAR(imbalance_degree(compute[0]) * pop(compute[0], 100).load_balance, 1, 1e-12);
    // Transposing exchanges the two views.
    Times transposed(steps, std::vector<double>(workers));
    for (std::size_t w = 0; w < workers; ++w)
      for (std::size_t t = 0; t < steps; ++t) transposed[t][w] = compute[w][t];
    EXPECT_DOUBLE_EQ(worker_imbalance(compute), step_imbalance(transposed));
  }
}

Event event(EventKind kind, double begin, double end, int step = 0) {
  Event e;
  e.kind = kind;
  e.step = step;
  e.begin_s = begin;
  e.end_s = end;
  return e;
}

TEST(OverheadShare, SumsBeforeItDivides) {
  OverheadShare share;
  EXPECT_EQ(share.share(), 0);
  share.add(3, 4);
  EXPECT_DOUBLE_EQ(share.share(), 0.75) << "one step alone";
  share.add(0.1, 1);
  EXPECT_DOUBLE_EQ(share.share(), 0.1) << "the first step no longer counts";
  share.add(0.2, 5);
  EXPECT_DOUBLE_EQ(share.share(), (0.1 + 0.2) / 6);
}

TEST(OverheadShare, SecondsOfAKindAreThoseOfItsStep) {
  const std::vector<Event> events{
      event(EventKind::tuning, 0, 9, 0), event(EventKind::tuning, 10, 10.5, 1),
      event(EventKind::gradient_reduce, 10.1, 10.2, 1), event(EventKind::tuning, 12, 12.25, 1),
      event(EventKind::planning, 13, 14, 1)};
  EXPECT_DOUBLE_EQ(kind_seconds(events, EventKind::tuning, 1), 0.75)
      << "what waits inside it belongs to it";
  EXPECT_DOUBLE_EQ(kind_seconds(events, EventKind::planning, 1), 1);
  EXPECT_DOUBLE_EQ(kind_seconds(events, EventKind::planning, 0), 0);
}

TEST(ExclusiveSeconds, NestedEventsCountOnce) {
  const std::vector<Event> events = {
      event(EventKind::step, 0, 10),         event(EventKind::forward, 1, 5),
      event(EventKind::layer_forward, 1, 4), event(EventKind::attention_forward, 2, 3),
      event(EventKind::ring_wait, 3, 3.5),   event(EventKind::gradient_reduce, 6, 8)};
  EXPECT_EQ(exclusive_seconds(events), (std::vector<double>{4, 1, 1.5, 1, 0.5, 2}));
  EXPECT_TRUE(exclusive_seconds({}).empty());
}

TEST(ExclusiveSeconds, CopiesRunBesideTheOthers) {
  const std::vector<Event> events = {
      event(EventKind::forward, 0, 10), event(EventKind::fetch, 1, 6),
      event(EventKind::copy_wait, 5, 6), event(EventKind::offload, 7, 12)};
  EXPECT_EQ(exclusive_seconds(events), (std::vector<double>{9, 0, 1, 0}));
}

TEST(ExclusiveSeconds, OverlapGoesToTheLaterEventAndFurtherOut) {
  // The second event outlives the first: the step around both loses their union.
  const std::vector<Event> events = {event(EventKind::step, 0, 20), event(EventKind::send, 1, 10),
                                     event(EventKind::forward, 5, 15)};
  EXPECT_EQ(exclusive_seconds(events), (std::vector<double>{6, 4, 10}));
}

TEST(ExclusiveSeconds, AgreesWithASecondBySecondReference) {
  const unsigned seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    // Random events on whole seconds, shuffled, nested or overlapping; begins are distinct so that
    // "later begun" is clear.
    std::vector<int> begins(30);
    for (int i = 0; i < 30; ++i) begins[i] = i;
    std::shuffle(begins.begin(), begins.end(), random);
    std::vector<Event> events;
    for (std::size_t i = 0; i < 1 + random() % 12; ++i)
      events.push_back(
          event(EventKind::forward, begins[i], begins[i] + static_cast<int>(random() % 15)));
    std::vector<double> expected(events.size());
    for (int second = 0; second < 50; ++second) {
      int owner = -1;
      for (std::size_t i = 0; i < events.size(); ++i)
        if (events[i].begin_s <= second && second < events[i].end_s &&
            (owner < 0 || events[i].begin_s > events[owner].begin_s))
          owner = static_cast<int>(i);
      if (owner >= 0) expected[owner] += 1;
    }
    EXPECT_EQ(exclusive_seconds(events), expected);
  }
}

}  // namespace
}  // namespace ballast
