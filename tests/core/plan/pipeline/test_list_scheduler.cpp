// List scheduling: its clock is the simulator's, and giving up early loses no order that is better.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "core/plan/pipeline/list_scheduler.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

struct Case {
  ChunkGroups groups;
  int stages = 1, k = 1;
  ScheduleCosts costs;
  ListRules rules;
  ListScheduler::Order order;
};

Case draw(std::mt19937_64& random) {
  const auto up_to = [&](int n) {
    return 1 + static_cast<int>(random() % static_cast<unsigned>(n));
  };
  Case drawn;
  drawn.stages = up_to(6), drawn.k = up_to(3);
  int micro_batches = 0;
  for (int g = up_to(6); g > 0; --g) {
    std::vector<int> group(static_cast<std::size_t>(up_to(5)));
    for (int& m : group) m = micro_batches++;
    drawn.groups.push_back(group);
  }
  // Seconds that differ by stage, kind and micro-batch; transfers too.
  const std::uint64_t salt = random();
  const auto seconds = [salt](int stage, int micro_batch, OpKind kind) {
    std::mt19937_64 own(salt + static_cast<std::uint64_t>(stage * 1009 + micro_batch * 31 +
                                                          static_cast<int>(kind)));
    return 0.1 + static_cast<double>(own() % 1000) / 500;
  };
  drawn.costs.duration = [seconds](int stage, const Op& op) {
    if (op.kind == OpKind::backward)
      return seconds(stage, op.micro_batch, OpKind::backward_input) +
             seconds(stage, op.micro_batch, OpKind::backward_weight);
    return seconds(stage, op.micro_batch, op.kind) / (computes(op.kind) ? 1 : 20);
  };
  drawn.rules = {random() % 2 == 0, random() % 2 == 0, static_cast<WeightHalves>(random() % 4)};
  drawn.order.resize(drawn.groups.size());
  std::iota(drawn.order.begin(), drawn.order.end(), std::size_t{0});
  std::shuffle(drawn.order.begin(), drawn.order.end(), random);
  return drawn;
}

TEST(ListSchedulerSlow, EndIsThatOfTheSimulatorAndIsGivenUpOnlyAboveTheLimit) {
  std::mt19937_64 random(test_seed());
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  int given_up = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const Case c = draw(random);
    ListScheduler scheduler(c.groups, c.stages, c.k, c.costs);
    const double end = scheduler.end_s(c.order, c.rules, kNoLimit);
    const Schedule schedule = scheduler.schedule(c.order, c.rules);
    EXPECT_EQ(problems(schedule), "");
    // Where halves follow each other as one op, its input half lets the stage before wait longer.
    if (!c.rules.split()) {
      EXPECT_NEAR(simulate(schedule, c.costs).step_time_s, end, 1e-9 * end);
    }
    EXPECT_GE(end, scheduler.least_s(c.rules.split() && c.stages > 1) * (1 - 1e-9));
    for (const double limit : {end, 1.01 * end, 0.999 * end, 0.9 * end, 0.5 * end}) {
      const double found = scheduler.end_s(c.order, c.rules, limit);
      if (end <= limit) {
        EXPECT_EQ(found, end);
      } else {
        EXPECT_TRUE(found == end || found == kNoLimit) << found << " of " << end;
        given_up += found == kNoLimit ? 1 : 0;
      }
    }
  }
  EXPECT_GT(given_up, 300);
}

}  // namespace
}  // namespace ballast
