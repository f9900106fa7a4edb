// Two-level partition against exhaustive search and longest-first; budget averages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/latency_batching.hpp"
#include "core/plan/batch/partition.hpp"
#include "tests/seed.hpp"

using namespace ballast;

namespace {

/// Least possible heaviest bin, over every assignment (with the first empty bin only).
double exhaustive(const std::vector<double>& weights, int bins) {
  std::vector<double> load(static_cast<std::size_t>(bins), 0);
  double best = 1e300;
  const std::function<void(std::size_t)> place = [&](std::size_t i) {
    if (*std::max_element(load.begin(), load.end()) >= best) return;
    if (i == weights.size()) {
      best = *std::max_element(load.begin(), load.end());
      return;
    }
    for (double& l : load) {
      const double before = l;
      l += weights[i];
      place(i + 1);
      l = before;
      if (before == 0) break;
    }
  };
  place(0);
  return best;
}

/// ChatQA2-like (below 4K or above 16K) and LongAlign-like (8K to 72K, most 8K to 16K) lengths.
std::int64_t draw(std::mt19937_64& random, int mix) {
  std::uniform_real_distribution<> u(0, 1);
  if (mix == 0)
    return u(random) < 0.5 ? 200 + static_cast<std::int64_t>(3800 * u(random))
                           : 16384 + static_cast<std::int64_t>(16384 * u(random));
  return u(random) < 0.7 ? 8192 + static_cast<std::int64_t>(8192 * u(random))
                         : static_cast<std::int64_t>(16384 * std::pow(4.4, u(random)));
}

double latency_of(std::int64_t tokens) {
  return 1e-6 * static_cast<double>(tokens) *
         (1 + static_cast<double>(std::min<std::int64_t>(tokens, 16384)) / 8192);
}

std::vector<std::int64_t> real_lengths() {
  std::vector<std::int64_t> list;
  // Beside a clone of the repository, or where BALLAST_LENGTHS says.
  const char* stated = std::getenv("BALLAST_LENGTHS");
  const std::filesystem::path beside =
      std::filesystem::path(BALLAST_TESTS_DIR) / "../../shared/data/prolong_lengths.txt";
  std::ifstream file(stated != nullptr ? std::filesystem::path(stated) : beside);
  for (std::int64_t n = 0; file >> n;) list.push_back(n);
  return list;
}

}  // namespace

TEST(PartitionSlow, NearExhaustiveAndNeverWorseThanLongestFirst) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 2000; ++round) {
    const int bins = 2 + static_cast<int>(random() % 4);
    // Up to 16 samples; as many bins as exhaustive search has time for.
    const std::size_t n = 1 + random() % (bins <= 3 ? 16 : 13);
    std::vector<double> weights;
    for (std::size_t i = 0; i < n; ++i)
      weights.push_back(random() % 3 == 0
                            ? static_cast<double>(random() % 20)
                            : latency_of(draw(random, static_cast<int>(random() % 2))) * 1e3);
    const Partition parts = balanced_partition(weights, bins);
    std::vector<int> seen(n, 0);
    for (const auto& bin : parts)
      for (const std::uint32_t i : bin) ++seen[i];
    ASSERT_EQ(parts.size(), static_cast<std::size_t>(bins));
    ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<std::ptrdiff_t>(n));
    const double found = heaviest(parts, weights);
    ASSERT_LE(found, heaviest(longest_first_partition(weights, bins), weights) * (1 + 1e-12));
    ASSERT_LE(found, 1.02 * exhaustive(weights, bins) + 1e-12)
        << n << " weights in " << bins << " bins, round " << round;
  }
  EXPECT_THROW(balanced_partition(std::vector<double>{1}, 0), Error);
  EXPECT_THROW(balanced_partition(std::vector<double>{-1}, 2), Error);
  EXPECT_THROW(balanced_partition(std::vector<double>{std::nan("")}, 2), Error);
}

TEST(PartitionSlow, ManySamplesReachTheBoundOverRanks) {
  std::mt19937_64 random(test_seed());
  const auto real = real_lengths();
  if (real.empty()) std::printf("no file of real lengths here: the two mixes alone\n");
  for (int mix = 0; mix < (real.empty() ? 2 : 3); ++mix) {
    std::vector<double> over;
    for (int round = 0; round < 200; ++round) {
      const int ranks = 2 << (random() % 3);  // 2, 4, 8
      std::vector<double> weights;
      const std::size_t n = 64 + random() % 200;
      for (std::size_t i = 0; i < n; ++i)
        weights.push_back(latency_of(mix < 2 ? draw(random, mix) : real[random() % real.size()]));
      const double mean = std::accumulate(weights.begin(), weights.end(), 0.0) / ranks;
      over.push_back(heaviest(balanced_partition(weights, ranks), weights) /
                     std::max(mean, *std::max_element(weights.begin(), weights.end())));
    }
    std::sort(over.begin(), over.end());
    std::printf("mix %d: median %.6f, worst %.6f of max(longest, mean)\n", mix,
                over[over.size() / 2], over.back());
    EXPECT_LE(over[over.size() / 2], 1.02);
  }
}

TEST(Sab, TwoLevelsKeepEverySampleAndItsOrder) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 300; ++round) {
    BatchingOptions options;
    options.method = round % 2 == 0 ? Batching::sab : Batching::lbb;
    options.dp = 1 + static_cast<int>(random() % 4);
    options.micro_batch_samples = static_cast<int>(random() % 3);
    options.micro_batch_tokens = 16384;
    options.sample_cost = latency_of;
    std::vector<SampleLength> samples;
    for (std::size_t i = 0; i < 1 + random() % 40; ++i)
      samples.push_back({static_cast<std::int64_t>(1000 - i), draw(random, 0), 7});
    const Batch batch = plan_batch(5, samples, options);
    ASSERT_EQ(batch.micro_batches.size(), static_cast<std::size_t>(options.dp));
    std::multiset<std::int64_t> found;
    std::vector<double> load(batch.micro_batches.size(), 0), weights;
    for (const SampleLength& s : samples)
      weights.push_back(options.method == Batching::lbb ? static_cast<double>(s.tokens)
                                                        : latency_of(s.tokens));
    for (std::size_t d = 0; d < batch.micro_batches.size(); ++d)
      for (const MicroBatch& m : batch.micro_batches[d]) {
        ASSERT_FALSE(m.segments.empty());
        if (options.micro_batch_samples == 0 && m.segments.size() > 1)
          ASSERT_LE(m.tokens(), options.micro_batch_tokens);
        for (std::size_t s = 0; s < m.segments.size(); ++s) {
          found.insert(m.segments[s].sample);
          const auto at = static_cast<std::size_t>(1000 - m.segments[s].sample);
          ASSERT_EQ(m.segments[s], (Segment{samples[at].sample, 0, samples[at].tokens, 7}));
          if (s > 0) ASSERT_LT(m.segments[s].sample, m.segments[s - 1].sample);  // the given order
          load[d] += weights[at];
        }
      }
    ASSERT_EQ(found.size(), samples.size());
    ASSERT_EQ(std::set<std::int64_t>(found.begin(), found.end()).size(), samples.size());
    ASSERT_LE(*std::max_element(load.begin(), load.end()),
              heaviest(longest_first_partition(weights, options.dp), weights) * (1 + 1e-12));
    if (options.micro_batch_samples > 0) {
      const std::size_t each =
          (samples.size() + static_cast<std::size_t>(options.micro_batch_samples * options.dp) -
           1) /
          static_cast<std::size_t>(options.micro_batch_samples * options.dp);
      for (const auto& list : batch.micro_batches) ASSERT_LE(list.size(), each);
    }
  }
  BatchingOptions options;
  options.method = Batching::sab;
  EXPECT_THROW(plan_batch(0, {{0, 5, 5}}, options), Error);
  options.method = Batching::none;
  options.micro_batch_samples = 2;
  EXPECT_EQ(plan_batch(0, {{0, 5, 5}, {1, 5, 5}, {2, 5, 5}}, options).micro_batches[0].size(), 2u);
}

TEST(Sab, SamplesOfNoWeightThatFillTooMuchAreRefused) {
  BatchingOptions options;
  options.method = Batching::sab;
  options.micro_batch_tokens = 1024;
  options.sample_cost = [](std::int64_t) { return 0.0; };
  EXPECT_EQ(plan_batch(0, {{0, 600, 5}, {1, 400, 5}}, options).samples(), 2);
  EXPECT_THROW(plan_batch(0, {{0, 600, 5}, {1, 600, 5}}, options), Error);
}

TEST(Sab, BudgetAveragesMoveTowardsFinalBudgets) {
  BudgetAverages averages(32, 0.9);
  EXPECT_EQ(averages.budget(0), 32);
  EXPECT_EQ(averages.budget(1 << 20), 32);
  std::vector<double> sums(BudgetAverages::kBins, 0), counts(BudgetAverages::kBins, 0);
  const auto bin = static_cast<std::size_t>(BudgetAverages::bin(5000));
  EXPECT_EQ(BudgetAverages::bin(4096), BudgetAverages::bin(8191));
  EXPECT_NE(BudgetAverages::bin(4095), BudgetAverages::bin(4096));
  sums[bin] = 3 * 12, counts[bin] = 3;
  averages.update(sums, counts);
  EXPECT_NEAR(averages.budget(5000), 0.9 * 32 + 0.1 * 12, 1e-12);
  EXPECT_EQ(averages.budget(500), 32);
  BudgetAverages other(1, 0.5);
  other.restore(averages.values());
  EXPECT_EQ(other.budget(5000), averages.budget(5000));
  EXPECT_THROW(other.restore({1, 2}), Error);
}
