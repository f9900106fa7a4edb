// Profile table and latency model: against times that a formula makes, monotone on random tables,
// damaged tables.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/base/error.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/profile_table.hpp"
#include "core/predict/table_costs.hpp"
#include "tests/seed.hpp"

using namespace ballast;

namespace {

/// Pairs that a query axis of n tokens after p computes with budget k of blocks of `block`, pair by
/// pair.
double slow_pairs(std::int64_t n, std::int64_t p, std::int64_t k, std::int64_t block) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i)
    sum += static_cast<double>(k == 0 ? p + i + 1 : std::min(p + i + 1, k * block));
  return sum;
}

using Seconds = std::function<double(std::int64_t n, std::int64_t p, std::int64_t k)>;

/// A table of moba blocks of 256 over powers of two, whose attention takes `seconds`.
ProfileTable table_of(const Seconds& seconds, const std::vector<std::int64_t>& prefixes = {0}) {
  ProfileTable t;
  t.block_tokens = 256;
  for (const ProfilePass pass : {ProfilePass::forward, ProfilePass::backward}) {
    const double factor = pass == ProfilePass::forward ? 1 : 2.5;
    for (std::int64_t n = 1024; n <= 65536; n *= 2) {
      t.rows.push_back({ProfilePart::rest,
                        {},
                        n,
                        0,
                        0,
                        1,
                        Recompute::none,
                        pass,
                        factor * (1e-5 + 2e-7 * static_cast<double>(n)),
                        0,
                        pass == ProfilePass::forward ? 100 * n : 0});
      for (const std::int64_t p : prefixes)
        for (std::int64_t k = 4; k <= 256; k *= 2) {
          t.rows.push_back({ProfilePart::attention, PatternKind::moba, n, p, k, 1, Recompute::none,
                            pass, factor * seconds(n, p, k), 0, 0});
          if (k * 256 >= n + p) break;
        }
    }
  }
  return t;
}

MicroBatch packed(std::initializer_list<std::int64_t> lengths) {
  MicroBatch m;
  for (const std::int64_t n : lengths)
    m.segments.push_back({static_cast<std::int64_t>(m.segments.size()), 0, n, n});
  return m;
}

std::string refusal(const ProfileTable& table, double limit = 0.2) {
  std::vector<std::string> notes;
  try {
    checked(table, limit, notes);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST(ProfileTable, MeanKeysCountsPairs) {
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 2000; ++i) {
    const std::int64_t n = 1 + static_cast<std::int64_t>(random() % 700),
                       p = static_cast<std::int64_t>(random() % 3) *
                           static_cast<std::int64_t>(random() % 500);
    const std::int64_t block = 1 + static_cast<std::int64_t>(random() % 100),
                       k = static_cast<std::int64_t>(random() % 20);
    EXPECT_NEAR(mean_keys(n, p, k, block) * static_cast<double>(n), slow_pairs(n, p, k, block),
                1e-6 * slow_pairs(n, p, k, block))
        << n << " " << p << " " << k << " " << block;
  }
}

TEST(LatencyModel, ATokenCostsNoLessInAShorterCall) {
  const double x[] = {64, 128, 256}, steep[] = {1, 4, 32}, flat[] = {1, 1.2, 1.5};
  const PowerCurve falls(x, steep), floor(x, flat);
  EXPECT_NEAR(falls(16), 0.25, 1e-12);
  EXPECT_NEAR(falls(512), 32 * 4, 1e-9);  // the slope 3 of the last two is taken for 2
  EXPECT_NEAR(floor(32), 1 / 1.2, 1e-12);
  EXPECT_NEAR(floor(1024), 1.5 * 4, 1e-12);  // nor does work cost less in a longer one
  EXPECT_NEAR(falls(96), std::pow(1.5, 2), 1e-12);
}

TEST(LatencyModel, GivesTheMeasuredPointsBack) {
  const Seconds seconds = [](std::int64_t n, std::int64_t p, std::int64_t k) {
    return 2e-5 + 1e-10 * slow_pairs(n, p, k, 256);
  };
  std::vector<std::string> notes;
  const ProfileTable t = checked(table_of(seconds, {0, 8192}), 0.2, notes);
  EXPECT_TRUE(notes.empty());
  const LatencyModel model(t, {.pattern = PatternKind::moba});
  for (const ProfileRow& r : t.rows) {
    const LayerTime time = r.part == ProfilePart::rest
                               ? model.rest(r.query_tokens)
                               : model.attention(r.query_tokens, r.prefix_tokens, r.budget);
    EXPECT_NEAR(r.pass == ProfilePass::forward ? time.forward_s : time.backward_s, r.median_s,
                1e-9 * r.median_s)
        << describe(r);
  }
  EXPECT_NEAR(model.activation_bytes(3000), 300000, 1);
  // A micro-batch is the rest once and each segment's attention.
  const MicroBatch m = packed({4096, 1024, 16384});
  const LayerTime time = model.predict(m, 16);
  EXPECT_NEAR(time.forward_s,
              model.rest(21504).forward_s + model.attention(4096, 0, 16).forward_s +
                  model.attention(1024, 0, 16).forward_s + model.attention(16384, 0, 16).forward_s,
              1e-12);
  const std::vector<std::int64_t> budgets{16, 4, 32};
  EXPECT_NEAR(model.predict(m, budgets).backward_s - model.predict(m, 16).backward_s,
              model.attention(16384, 0, 32).backward_s - model.attention(16384, 0, 16).backward_s,
              1e-12);
}

TEST(LatencyModel, HeldOutPointsAreNear) {
  // Time is neither FLOPs nor length: a floor, an index that grows with the blocks, and pairs that
  // cost more where few are computed.
  const Seconds seconds = [](std::int64_t n, std::int64_t p, std::int64_t k) {
    const double pairs = slow_pairs(n, p, k, 256), visible = slow_pairs(n, p, 0, 256);
    return 2e-5 + 2e-9 * static_cast<double>(n) + 1e-10 * pairs * (1 + 0.4 * (1 - pairs / visible));
  };
  std::vector<std::string> notes;
  const LatencyModel model(checked(table_of(seconds, {0, 8192, 32768}), 0.2, notes),
                           {.pattern = PatternKind::moba});
  std::mt19937_64 random(test_seed());
  std::vector<double> errors;
  for (int i = 0; i < 500; ++i) {
    const auto n =
        static_cast<std::int64_t>(1024 * std::exp2(std::uniform_real_distribution<>(0, 6)(random)));
    const std::int64_t p = i % 2 == 0 ? 0 : 256 * static_cast<std::int64_t>(random() % 128);
    const std::int64_t k = 4 + static_cast<std::int64_t>(random() % 100);
    const double truth = seconds(n, p, k);
    errors.push_back(std::abs(model.attention(n, p, k).forward_s / truth - 1));
  }
  std::sort(errors.begin(), errors.end());
  std::printf("median %.3f, 90 %% %.3f, worst %.3f\n", errors[250], errors[450], errors[499]);
  EXPECT_LT(errors[250], 0.04);
  EXPECT_LT(errors[450], 0.10);
}

TEST(LatencyModelSlow, NeverFallsAndAlignIsTheLargestBudget) {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    // Times with noise that repair makes monotone.
    const Seconds seconds = [&](std::int64_t n, std::int64_t p, std::int64_t k) {
      return (1e-4 + 1e-10 * slow_pairs(n, p, k, 256)) *
             std::exp(std::uniform_real_distribution<>(-0.3, 0.3)(random));
    };
    std::vector<std::string> notes;
    const ProfileTable table = checked(table_of(seconds, {0, 8192}), 0.5, notes);
    const LatencyModel model(table, {.pattern = PatternKind::moba});
    const TableCosts costs("table", table, PatternKind::moba, {});
    for (int i = 0; i < 200; ++i) {
      const std::int64_t n = 1 + static_cast<std::int64_t>(random() % 150000),
                         p = static_cast<std::int64_t>(random() % 40000),
                         k = 1 + static_cast<std::int64_t>(random() % 300);
      const double here = model.attention(n, p, k).forward_s, slack = 1e-12 * here;
      EXPECT_GT(here, 0);
      EXPECT_GE(
          model.attention(n + static_cast<std::int64_t>(random() % 3000), p, k).forward_s + slack,
          here)
          << n << " " << p << " " << k;
      EXPECT_GE(
          model.attention(n, p + static_cast<std::int64_t>(random() % 3000), k).forward_s + slack,
          here)
          << n << " " << p << " " << k;
      EXPECT_GE(
          model.attention(n, p, k + static_cast<std::int64_t>(random() % 30)).forward_s + slack,
          here)
          << n << " " << p << " " << k;
      EXPECT_GE(model.attention(n, p, 0).forward_s + slack, here);
      EXPECT_GE(model.rest(n + 100).backward_s, model.rest(n).backward_s);
      // align against every candidate.
      std::vector<std::int64_t> candidates;
      for (std::int64_t c = 2; c <= 128; c += 1 + static_cast<std::int64_t>(random() % 9))
        candidates.push_back(c);
      const MicroBatch m = packed({n, 1 + static_cast<std::int64_t>(random() % 20000)});
      const double target =
          model.predict(m, 40).total_s() * std::uniform_real_distribution<>(0.5, 1.5)(random);
      std::int64_t best = candidates.front();
      for (const std::int64_t c : candidates)
        if (model.predict(m, c).total_s() <= target) best = c;
      EXPECT_EQ(align_budget(costs, m, target, candidates, {}, Recompute::none), best);
    }
  }
}

TEST(LatencyModel, RanksShareAMicroBatch) {
  std::vector<std::string> notes;
  ProfileTable t = table_of([](std::int64_t n, std::int64_t p, std::int64_t k) {
    return 1e-10 * slow_pairs(n, p, k, 256);
  });
  t.links = {{"inner", 1e-5, 1e11}};
  t = checked(t, 0.2, notes);
  const LatencyModel one(t, {.pattern = PatternKind::moba}),
      ring(t, {.pattern = PatternKind::moba, .cp = 4}),
      ulysses(t, {.pattern = PatternKind::moba, .sp = 4, .exchange_bytes_per_token = 10000});
  const MicroBatch m = packed({16384});
  EXPECT_NEAR(ring.attention(16384, 0, 8).forward_s, one.attention(16384, 0, 8).forward_s / 4,
              1e-12);
  EXPECT_NEAR(ring.rest(16384).forward_s, one.rest(4096).forward_s, 1e-12);
  EXPECT_NEAR(ulysses.predict(m, 8).forward_s - ring.predict(m, 8).forward_s,
              2e-5 + 0.75 * 10000 * 4096 / 1e11, 1e-12);
  EXPECT_THROW(LatencyModel(t, {.pattern = PatternKind::dense}), Error);
  EXPECT_THROW(LatencyModel(t, {.pattern = PatternKind::moba, .recompute = Recompute::full}),
               Error);
}

TEST(ProfileTable, HolesAreFilledOrRefused) {
  const Seconds seconds = [](std::int64_t n, std::int64_t p, std::int64_t k) {
    return 2e-5 + 1e-10 * slow_pairs(n, p, k, 256);
  };
  const ProfileTable whole = table_of(seconds);
  const auto without = [&](auto gone) {
    ProfileTable t = whole;
    std::erase_if(t.rows, gone);
    return t;
  };
  // Between two budgets: filled, and said so.
  std::vector<std::string> notes;
  ProfileTable t = whole;
  for (ProfileRow& r : t.rows)
    if (r.part == ProfilePart::attention && r.query_tokens == 16384 && r.budget == 16)
      r.median_s = r.pass == ProfilePass::forward ? std::nan("") : -1;
  const LatencyModel model(checked(t, 0.2, notes), {.pattern = PatternKind::moba});
  EXPECT_EQ(notes.size(), 4u);  // two rows without a time, two points filled
  EXPECT_NEAR(model.attention(16384, 0, 16).forward_s, seconds(16384, 0, 16),
              0.05 * seconds(16384, 0, 16));
  // Ends, a pass, everything: refused.
  EXPECT_NE(refusal(without([](const ProfileRow& r) {
              return r.query_tokens == 8192 && r.budget == 4;
            })).find("8192 tokens after 0 lack budget 4"),
            std::string::npos);
  EXPECT_NE(refusal(without([](const ProfileRow& r) {
              return r.query_tokens == 8192 && r.budget >= 32;
            })).find("lack budget 32"),
            std::string::npos);
  EXPECT_NE(refusal(without([](const ProfileRow& r) {
              return r.part == ProfilePart::rest && r.pass == ProfilePass::backward;
            })).find("without backward"),
            std::string::npos);
  EXPECT_NE(refusal(without([](const ProfileRow&) { return true; })), "");
  // Two rows for one point.
  t = whole;
  t.rows.push_back(t.rows.front());
  EXPECT_NE(refusal(t).find("two rows for rest"), std::string::npos);
  EXPECT_EQ(refusal(whole), "");
}

TEST(ProfileTable, TimesThatFallAreRepairedWithinTheLimit) {
  const Seconds seconds = [](std::int64_t n, std::int64_t p, std::int64_t k) {
    return 2e-5 + 1e-10 * slow_pairs(n, p, k, 256);
  };
  ProfileTable t = table_of(seconds);
  double longer = 0;
  for (const ProfileRow& r : t.rows)
    if (r.part == ProfilePart::rest && r.query_tokens == 4096 && r.pass == ProfilePass::forward)
      longer = r.median_s;
  for (ProfileRow& r : t.rows)
    if (r.part == ProfilePart::rest && r.query_tokens == 2048 && r.pass == ProfilePass::forward)
      r.median_s = 1.1 * longer;
  std::vector<std::string> notes;
  const ProfileTable repaired = checked(t, 0.1, notes);
  EXPECT_EQ(notes.size(), 1u);
  for (const ProfileRow& r : repaired.rows)
    if (r.part == ProfilePart::rest && (r.query_tokens == 2048 || r.query_tokens == 4096) &&
        r.pass == ProfilePass::forward) {
      EXPECT_NEAR(r.median_s, std::sqrt(1.1) * longer, 1e-12);
    }
  EXPECT_NE(refusal(t, 0.02).find("profile.repair_limit"), std::string::npos);
  // Passes as short as launches vary by more, and weigh nothing.
  for (ProfileRow& r : t.rows) r.median_s *= 1e-5 / longer;
  EXPECT_EQ(refusal(t, 0.02), "");
}

TEST(ProfileTable, BudgetsThatTakeLongerThanEverythingGetItsTime) {
  const auto whole = [](std::int64_t n) { return 2e-5 + 1e-10 * slow_pairs(n, 0, 0, 256); };
  // Choosing costs as much as attention to 16,384 keys.
  const Seconds seconds = [&](std::int64_t n, std::int64_t p, std::int64_t k) {
    const double chosen = 2e-5 + 1e-10 * slow_pairs(n, p, k, 256);
    return k * 256 < n + p ? chosen + whole(16384) : chosen;
  };
  std::vector<std::string> notes;
  const ProfileTable found = checked(table_of(seconds), 0.25, notes);
  EXPECT_EQ(notes.front().find("attention moba"), 0u);
  EXPECT_NE(notes.front().find("longer than attention to everything"), std::string::npos);
  std::size_t seen = 0;
  for (const ProfileRow& r : found.rows)
    if (r.part == ProfilePart::attention && r.pass == ProfilePass::forward &&
        r.query_tokens <= 8192) {
      EXPECT_DOUBLE_EQ(r.median_s, whole(r.query_tokens)) << r.query_tokens << " " << r.budget;
      seen += r.budget * 256 < r.query_tokens;
    }
  EXPECT_GE(seen, 6u);
  // Long ones keep what they save.
  for (const ProfileRow& r : found.rows)
    if (r.part == ProfilePart::attention && r.query_tokens == 65536 && r.budget == 4) {
      EXPECT_LT(r.median_s, 2.5 * 0.25 * whole(65536));
    }
}
