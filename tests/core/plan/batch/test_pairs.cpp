// Pairs of answers in a batch: placed as one sample, two documents side by side; weighed by pairs;
// kept by the JSON form of a plan.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/pairs.hpp"
#include "core/plan/plan_json.hpp"
#include "core/plan/plan_step.hpp"
#include "tests/core/plan/batch/long_tailed_lengths.hpp"

namespace ballast {
namespace {

std::vector<SampleLength> some_pairs() {
  std::vector<SampleLength> samples;
  for (std::int64_t s = 0; s < 12; ++s) {
    const std::int64_t chosen = 5 + 7 * s % 31, rejected = 3 + 11 * s % 29;
    samples.push_back({s, chosen + rejected, 3 + s, chosen, 1 + s});
  }
  return samples;
}

TEST(Pairs, StandSideBySideInOneMicroBatch) {
  const auto samples = some_pairs();
  for (const Batching method : {Batching::none, Batching::packed, Batching::hbp, Batching::lbb}) {
    BatchingOptions options;
    options.method = method;
    options.dp = 2;
    options.micro_batch_tokens = 80;
    options.groups = {{40}, {80}};
    const Batch batch = plan_batch(0, samples, options);
    EXPECT_EQ(batch.samples(), 12) << name(method);
    std::set<std::int64_t> found;
    for (const auto& list : batch.micro_batches)
      for (const MicroBatch& m : list)
        for (std::size_t s = 0; s < m.segments.size(); s += 2) {
          ASSERT_LT(s + 1, m.segments.size());
          const Segment &chosen = m.segments[s], &rejected = m.segments[s + 1];
          const SampleLength& pair = samples.at(static_cast<std::size_t>(chosen.sample));
          EXPECT_EQ(chosen, (Segment{pair.sample, 0, pair.chosen_tokens, pair.chosen_loss_tokens}));
          EXPECT_EQ(rejected, (Segment{pair.sample, 0, pair.tokens - pair.chosen_tokens, 2,
                                       pair.chosen_tokens}));
          EXPECT_TRUE(found.insert(pair.sample).second);
        }
    EXPECT_EQ(found.size(), samples.size()) << name(method);
  }
}

TEST(Pairs, AreTwoDocuments) {
  EXPECT_EQ(document_lengths({0, 2000, 10, 1900, 5}), (std::vector<std::int64_t>{1900, 100}));
  EXPECT_EQ(document_lengths({0, 2000, 10}), (std::vector<std::int64_t>{2000}));
}

// 1,000 + 1,000 tokens attend to half of what 2,000 would: four even and four uneven pairs a rank.
TEST(Pairs, WeighByTheirDocuments) {
  std::vector<SampleLength> samples;
  for (std::int64_t s = 0; s < 16; ++s) {
    const std::int64_t chosen = s % 2 == 0 ? 1000 : 1900;
    samples.push_back({s, 2000, 10, chosen, 5});
  }
  for (const Batching method : {Batching::packed, Batching::hbp, Batching::sab}) {
    BatchingOptions options;
    options.method = method;
    options.dp = 2;
    options.micro_batch_tokens = 2000;
    options.groups = {{2000}, {4000}};
    options.pair_cost_tokens = 1;
    options.sample_cost = [](std::int64_t n) { return static_cast<double>(n * n); };
    const Batch batch = plan_batch(0, samples, options);
    for (const auto& list : batch.micro_batches) {
      int uneven = 0;
      for (const MicroBatch& m : list)
        for (const Segment& s : m.segments) uneven += s.tokens() == 1900;
      EXPECT_EQ(uneven, 4) << name(method);
    }
  }
}

// Each answer of a pair begins at a block of a sparse pattern: 65 + 65 tokens take up 256.
TEST(PairsSlow, FillNoMoreThanAMicroBatchHoldsWithTheirPadding) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<SampleLength> samples;
    for (std::int64_t s = 0; s < 40; ++s) {
      const auto draw = [&](std::uint64_t i) {
        return static_cast<std::int64_t>(1 + random_bits(seed, i, static_cast<std::uint64_t>(s)) %
                                                 (seed == 0 ? 1 : 150));
      };
      const std::int64_t chosen = 64 + draw(0), rejected = 64 + draw(1);
      samples.push_back({s, chosen + rejected, 10, chosen, 5});
    }
    for (const Batching method : values_of<Batching>()) {
      BatchingOptions options;
      options.method = method;
      options.dp = 2, options.align = 64, options.micro_batch_tokens = 1024;
      options.groups = {{512}, {1024}};
      options.sample_cost = [](std::int64_t n) { return static_cast<double>(n); };
      options.placement_costs = std::make_shared<TestCosts>();
      const Batch batch = plan_batch(0, samples, options);
      EXPECT_EQ(batch.samples(), 40) << name(method);
      for (const auto& list : batch.micro_batches)
        for (const MicroBatch& m : list) EXPECT_LE(m.axis_tokens(), 1024) << name(method);
    }
  }
}

TEST(Pairs, OneThatPaddingAloneMakesTooLongIsRefusedByPlacement) {
  BatchingOptions options;
  options.method = Batching::balanced;
  options.align = 64, options.micro_batch_tokens = 128;
  options.placement_costs = std::make_shared<TestCosts>();
  EXPECT_NO_THROW(plan_batch(0, {{4, 128, 10, 64, 5}}, options));
  EXPECT_THROW(plan_batch(0, {{4, 128, 10, 65, 5}}, options), Error);
}

TEST(Pairs, WeighAlikeAndKeepTheirOriginInJson) {
  StepOptions options;
  options.mesh.dp = 2;
  options.batching.dp = 2;
  options.batching.micro_batch_tokens = 80;
  options.normaliser = LossNormaliser::pair_mean;
  const StepPlan plan = plan_step(3, some_pairs(), options);
  for (const PlannedMicroBatch& m : plan.micro_batches) EXPECT_DOUBLE_EQ(m.loss_weight, 1.0 / 12);
  const StepPlan again = step_plan_from_json(to_json(plan));
  EXPECT_EQ(again.hash(), plan.hash());
  EXPECT_EQ(again.micro_batches, plan.micro_batches);
  StepPlan moved = plan;
  moved.micro_batches.front().segments.at(1).origin += 1;
  EXPECT_NE(moved.hash(), plan.hash());
}

TEST(Pairs, OneThatIsCutIsRefusedWithTheLengthThatFits) {
  BatchingOptions options;
  options.method = Batching::packed;
  Batch batch;
  batch.micro_batches = {{{{{4, 0, 64, 0}}}, {{{4, 64, 100, 0}}}}};
  try {
    separate_pairs({&batch, 1}, {{4, 100, 10, 60, 5}}, 64);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("pair 4 of 100 tokens"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("holds 64 at most"), std::string::npos);
  }
}

}  // namespace
}  // namespace ballast
