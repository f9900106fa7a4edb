// Sampler: every sample once an epoch, in an order that depends on the seed and the epoch alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/data/sampler.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

std::int64_t one(std::int64_t) { return 1; }

TEST(Sampler, EpochsArePermutations) {
  Sampler sampler(997, test_seed(), 0);
  SamplerPosition at;
  std::vector<std::vector<std::int64_t>> epochs;
  for (int e = 0; e < 3; ++e) {
    EXPECT_EQ(at, (SamplerPosition{e, 0}));
    epochs.push_back(sampler.next(at, 0, 997, one));
    auto sorted = epochs.back();
    std::sort(sorted.begin(), sorted.end());
    std::vector<std::int64_t> all(997);
    std::iota(all.begin(), all.end(), 0);
    ASSERT_EQ(sorted, all) << "seed " << test_seed();
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  EXPECT_FALSE(std::is_sorted(epochs[0].begin(), epochs[0].end()));
  SamplerPosition again;
  EXPECT_EQ(Sampler(997, test_seed(), 0).next(again, 0, 997, one), epochs[0]);
  SamplerPosition third{2, 0};  // without having been through the epochs before
  EXPECT_EQ(Sampler(997, test_seed(), 0).next(third, 0, 997, one), epochs[2]);
  SamplerPosition other;
  EXPECT_NE(Sampler(997, test_seed() + 1, 0).next(other, 0, 997, one), epochs[0]);
}

TEST(Sampler, ShuffleIsUniform) {
  // 60000 epochs of 4 samples: each of the 24 orders about 2500 times.
  Sampler sampler(4, test_seed(), 0);
  std::map<std::vector<std::int64_t>, int> counts;
  SamplerPosition at;
  for (int e = 0; e < 60000; ++e) ++counts[sampler.next(at, 0, 4, one)];
  ASSERT_EQ(counts.size(), 24u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 2500, 300) << "seed " << test_seed();
}

TEST(SamplerSlow, AStepOfMoreSamplesThanCanBePlannedNamesItsKey) {
  Sampler sampler(1000, test_seed(), 0);
  SamplerPosition at;
  EXPECT_EQ(std::ssize(sampler.next(at, kMostStepSamples, 0, one)), kMostStepSamples);
  const SamplerPosition before = at;
  try {
    sampler.next(at, std::int64_t{1} << 34, 0, one);
    ADD_FAILURE() << "a step of 2^34 samples was taken";
  } catch (const Error& error) {
    for (const char* word : {"batching.global_tokens = 17179869184", "hold 16777216 tokens here"})
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
  EXPECT_EQ(at, before);
  // An epoch is counted in samples, and is no step.
  EXPECT_EQ(std::ssize(sampler.next(at, 0, kMostStepSamples + 1, one)), kMostStepSamples + 1);
}

TEST(Sampler, WithoutShuffleTheOrderIsTheDatasets) {
  Sampler sampler(5, test_seed(), 0, false);
  SamplerPosition at;
  EXPECT_EQ(sampler.next(at, 0, 7, one), (std::vector<std::int64_t>{0, 1, 2, 3, 4, 0, 1}));
  EXPECT_EQ(at, (SamplerPosition{1, 2}));
}

TEST(Sampler, StepsContinueEachOther) {
  // However the order is cut into steps, and wherever a run stops, the samples are the same.
  Sampler whole(101, test_seed(), 0.1), parts(101, test_seed(), 0.1);
  SamplerPosition a, b;
  const auto all = whole.next(a, 0, 500, one);
  std::mt19937_64 random(test_seed());
  std::vector<std::int64_t> joined;
  while (joined.size() < 500) {
    const std::int64_t count =
        std::min<std::int64_t>(1 + static_cast<std::int64_t>(random() % 40),
                               500 - static_cast<std::int64_t>(joined.size()));
    Sampler fresh(101, test_seed(), 0.1);  // a restart
    const auto step = (random() % 2 ? fresh : parts).next(b, 0, count, one);
    joined.insert(joined.end(), step.begin(), step.end());
  }
  EXPECT_EQ(joined, all) << "seed " << test_seed();
  EXPECT_EQ(a, b);
}

TEST(Sampler, StepsEndWithTheSampleThatReachesTheTokens) {
  std::mt19937_64 random(test_seed());
  std::vector<std::int64_t> lengths(50);
  for (auto& l : lengths) l = 1 + static_cast<std::int64_t>(random() % 1000);
  Sampler sampler(50, test_seed(), 0);
  SamplerPosition at;
  for (int step = 0; step < 40; ++step) {
    const std::int64_t wanted = 1 + static_cast<std::int64_t>(random() % 3000);
    const auto samples = sampler.next(
        at, wanted, 0, [&](std::int64_t s) { return lengths[static_cast<std::size_t>(s)]; });
    std::int64_t tokens = 0;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_LT(tokens, wanted);
      tokens += lengths[static_cast<std::size_t>(samples[i])];
    }
    EXPECT_GE(tokens, wanted) << "seed " << test_seed();
  }
}

TEST(Sampler, StepsLargerThanAnEpochWrap) {
  Sampler sampler(3, test_seed(), 0);
  SamplerPosition at;
  const auto samples = sampler.next(at, 0, 8, one);
  ASSERT_EQ(samples.size(), 8u);
  EXPECT_EQ(at, (SamplerPosition{2, 2}));
  EXPECT_EQ(std::set<std::int64_t>(samples.begin(), samples.begin() + 3).size(), 3u);
  EXPECT_EQ(std::set<std::int64_t>(samples.begin() + 3, samples.begin() + 6).size(), 3u);
  Sampler single(1, test_seed(), 0.5);  // one sample: nothing to hold out
  SamplerPosition alone;
  EXPECT_EQ(single.next(alone, 5, 0, [](std::int64_t) { return std::int64_t{2}; }),
            (std::vector<std::int64_t>{0, 0, 0}));
  EXPECT_EQ(alone, (SamplerPosition{3, 0}));
}

TEST(Sampler, ValidationIsADisjointShare) {
  Sampler sampler(20000, test_seed(), 0.05);
  const auto& held_out = sampler.validation();
  EXPECT_NEAR(static_cast<double>(held_out.size()), 1000, 200) << "seed " << test_seed();
  EXPECT_TRUE(std::is_sorted(held_out.begin(), held_out.end()));
  EXPECT_EQ(sampler.training_samples() + static_cast<std::int64_t>(held_out.size()), 20000);
  const std::set<std::int64_t> out(held_out.begin(), held_out.end());
  SamplerPosition at;
  for (std::int64_t s : sampler.next(at, 0, sampler.training_samples(), one))
    EXPECT_EQ(out.count(s), 0u);
  // A dataset that grows keeps its split.
  Sampler grown(20100, test_seed(), 0.05);
  EXPECT_TRUE(std::equal(held_out.begin(), held_out.end(), grown.validation().begin()));
  EXPECT_EQ(sampler.evaluated(0), held_out);
  EXPECT_EQ(sampler.evaluated(std::ssize(held_out) + 1), held_out);
  EXPECT_EQ(sampler.evaluated(2),
            std::vector<std::int64_t>(held_out.begin(), held_out.begin() + 2));
  EXPECT_TRUE(Sampler(100, test_seed(), 0).validation().empty());
}

TEST(Sampler, SmallDatasetsHaveBothSides) {
  for (std::uint64_t seed = test_seed(); seed < test_seed() + 50; ++seed) {
    for (double share : {0.001, 0.5, 0.999}) {
      Sampler sampler(2, seed, share);
      EXPECT_EQ(sampler.validation().size(), 1u) << "seed " << seed << " share " << share;
      EXPECT_EQ(sampler.training_samples(), 1);
    }
  }
}

TEST(Sampler, PiecesOfADocumentStayTogether) {
  const auto document = [](std::int64_t sample) { return sample / 7; };
  Sampler sampler(700, test_seed(), 0.3, true, document);
  std::set<std::int64_t> out;
  for (std::int64_t s : sampler.validation()) out.insert(document(s));
  EXPECT_EQ(sampler.validation().size(), 7 * out.size()) << "seed " << test_seed();
  EXPECT_FALSE(out.empty());
}

TEST(Sampler, MistakesAreRefused) {
  EXPECT_THROW(Sampler(0, test_seed(), 0), Error);
  EXPECT_THROW(Sampler(5, test_seed(), 1), Error);
  EXPECT_THROW(Sampler(5, test_seed(), -0.1), Error);
  EXPECT_THROW(Sampler(5, test_seed(), std::numeric_limits<double>::quiet_NaN()), Error);
  Sampler sampler(5, test_seed(), 0);
  SamplerPosition beyond{0, 5}, at;
  EXPECT_THROW(sampler.next(beyond, 0, 1, one), Error);
  EXPECT_EQ(beyond, (SamplerPosition{0, 5}));
  EXPECT_THROW(sampler.next(at, 0, 0, one), Error);
  EXPECT_THROW(sampler.next(at, 10, 0, [](std::int64_t) { return std::int64_t{0}; }), Error);
  EXPECT_EQ(at, SamplerPosition{});
}

TEST(Sampler, HeldOutSamplesAreNeverTrainedOn) {
  Sampler sampler(100, test_seed(), 0, true, {}, 30);
  EXPECT_EQ(sampler.training_samples(), 70);
  std::vector<std::int64_t> last(30);
  std::iota(last.begin(), last.end(), 70);
  EXPECT_EQ(sampler.validation(), last);
  SamplerPosition at;
  for (const std::int64_t s : sampler.next(at, 0, 700, one))
    ASSERT_LT(s, 70) << "seed " << test_seed();
  EXPECT_THROW(Sampler(30, test_seed(), 0, true, {}, 30), Error);
}

TEST(Sampler, CurriculumTakesShortSamplesFirstAndEachOnce) {
  const std::uint64_t seed = test_seed();
  SCOPED_TRACE(seed);
  const std::int64_t count = 1200;
  const auto length = [&](std::int64_t s) {
    return static_cast<std::int64_t>(1 + random_bits(seed, 3, static_cast<std::uint64_t>(s)) % 100);
  };
  for (const std::int64_t global_samples : {0, 9}) {
    const Curriculum curriculum{7, 30, 200, global_samples};
    Sampler sampler(count, seed, 0.1);
    sampler.begin_with(curriculum, length);
    EXPECT_EQ(sampler.short_steps(), 7);
    SamplerPosition position, resumed;
    std::vector<std::int64_t> seen;
    bool later_long = false;
    for (int step = 0; position.epoch == 0; ++step) {
      const SamplerPosition before = position;
      for (const std::int64_t s : sampler.next(position, 200, global_samples, length)) {
        if (step < 7) EXPECT_LE(length(s), 30) << "step " << step;
        later_long = later_long || (step >= 7 && length(s) > 30);
        seen.push_back(s);
      }
      if (step != 5) continue;
      // Another process that goes on from here takes the same samples.
      Sampler again(count, seed, 0.1);
      again.begin_with(curriculum, length);
      resumed = before;
      SamplerPosition same = before;
      EXPECT_EQ(again.next(resumed, 200, global_samples, length),
                sampler.next(same, 200, global_samples, length));
    }
    EXPECT_TRUE(later_long);
    seen.resize(static_cast<std::size_t>(sampler.training_samples()));
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(std::adjacent_find(seen.begin(), seen.end()), seen.end()) << "each sample once";
  }
  // A sample of exactly the bound is a short one.
  Sampler exact(8, seed, 0, false);
  exact.begin_with({1, 30, 0, 2}, [](std::int64_t s) { return s < 4 ? 31 : 30; });
  SamplerPosition first;
  EXPECT_EQ(exact.next(first, 0, 3, length), (std::vector<std::int64_t>{4, 5, 0}));
  Sampler few(count, seed, 0);
  few.begin_with({1000, 30, 200, 0}, length);
  EXPECT_GT(few.short_steps(), 0);
  EXPECT_LT(few.short_steps(), 1000);
}

}  // namespace
}  // namespace ballast
