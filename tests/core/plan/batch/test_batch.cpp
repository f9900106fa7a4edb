// Batch plans: every sample once, capacity kept, independent of the order of equal calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "core/base/error.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/loss_weights.hpp"

namespace ballast {
namespace {

std::vector<SampleLength> random_samples(std::mt19937_64& rng, int n, std::int64_t longest) {
  std::vector<SampleLength> samples;
  for (int i = 0; i < n; ++i) {
    const auto tokens = static_cast<std::int64_t>(rng() % (longest + 1));
    samples.push_back(
        {static_cast<std::int64_t>(1000 + i), tokens, std::max<std::int64_t>(0, tokens - 1)});
  }
  return samples;
}

TEST(Batch, EverySampleOnceWithinCapacity) {
  std::mt19937_64 rng(20261121);
  for (int trial = 0; trial < 300; ++trial) {
    const int n = static_cast<int>(rng() % 60), dp = 1 + static_cast<int>(rng() % 7);
    const auto samples = random_samples(rng, n, 500);
    for (const Batching method : {Batching::none, Batching::packed}) {
      const BatchingOptions options{method, 300, dp, 0.01};
      const Batch batch = plan_batch(trial, samples, options);
      ASSERT_EQ(static_cast<int>(batch.micro_batches.size()), dp);
      std::multiset<std::int64_t> seen;
      std::int64_t loss_tokens = 0;
      for (const auto& list : batch.micro_batches)
        for (const auto& mb : list) {
          EXPECT_FALSE(mb.segments.empty());
          if (mb.segments.size() > 1) EXPECT_LE(mb.tokens(), 300) << method << " trial " << trial;
          for (const auto& s : mb.segments) {
            seen.insert(s.sample);
            EXPECT_EQ(s.begin, 0);
            loss_tokens += s.loss_tokens;
          }
        }
      EXPECT_EQ(seen.size(), samples.size());
      EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), samples.size());
      EXPECT_EQ(batch.loss_tokens(), loss_tokens);
      EXPECT_EQ(batch.samples(), n);
      EXPECT_EQ(batch.micro_batches, plan_batch(trial, samples, options).micro_batches);
    }
  }
}

TEST(Batch, PackedUsesFewMicroBatchesAndBalancesThem) {
  std::mt19937_64 rng(7);
  const auto samples = random_samples(rng, 2000, 400);
  std::int64_t tokens = 0;
  for (const auto& s : samples) tokens += s.tokens;
  const Batch batch = plan_batch(0, samples, {Batching::packed, 4096, 4, 1e-3});
  std::size_t packs = 0;
  std::vector<double> load;
  for (const auto& list : batch.micro_batches) {
    packs += list.size();
    double sum = 0;
    for (const auto& mb : list)
      sum += static_cast<double>(mb.tokens()) + 1e-3 * mb.attention_pairs();
    load.push_back(sum);
  }
  EXPECT_LE(packs, static_cast<std::size_t>((tokens + 4095) / 4096 +
                                            1));  // best fit wastes at most one pack here
  EXPECT_LT(
      *std::max_element(load.begin(), load.end()) / *std::min_element(load.begin(), load.end()),
      1.1);
}

TEST(Batch, AnEpochIsPaddedLikeAStep) {
  BatchingOptions options;
  options.dp = 2, options.align = 64;
  const std::vector<SampleLength> samples(16, {0, 65, 64});
  const std::vector<Batch> epoch = plan_epoch(samples, options);
  ASSERT_FALSE(epoch.empty());
  for (const Batch& batch : epoch)
    for (const auto& list : batch.micro_batches)
      for (const MicroBatch& m : list) EXPECT_EQ(m.align, 64);
}

TEST(Batch, AttentionPairsCountPrefixes) {
  const MicroBatch mb{{{0, 0, 3, 2}, {1, 10, 12, 2}}};
  EXPECT_EQ(mb.tokens(), 5);
  EXPECT_EQ(mb.loss_tokens(), 4);
  EXPECT_DOUBLE_EQ(mb.attention_pairs(), (1 + 2 + 3) + (11 + 12));
}

TEST(Batch, ChunksWeighRightWhateverTheirPlanEstimates) {
  // One loss token in a sample of five chunks: the plan cannot know which chunk holds it.
  const Batch batch = plan_batch(0, {{0, 20, 1}, {1, 3, 2}},
                                 {.method = Batching::chunkflow, .micro_batch_tokens = 4});
  const LossWeights token(LossNormaliser::ave_token, batch), sum(LossNormaliser::sum, batch);
  for (const auto& list : batch.micro_batches)
    for (const MicroBatch& m : list) {
      EXPECT_DOUBLE_EQ(token.of(m), 1.0 / 3);
      EXPECT_DOUBLE_EQ(sum.of(m), 1);
    }
  const Batch none =
      plan_batch(0, {{0, 20, 0}}, {.method = Batching::chunkflow, .micro_batch_tokens = 4});
  EXPECT_EQ(LossWeights(LossNormaliser::ave_token, none).of(none.micro_batches[0][0]), 0);
}

TEST(Batch, TheChunksOfASampleWeighAsMuchAsTheSample) {
  const std::vector<SampleLength> samples{{0, 20, 19}, {1, 3, 2}, {2, 9, 8}};
  const Batch whole = plan_batch(0, samples, {.method = Batching::none, .dp = 2}),
              cut = plan_batch(0, samples,
                               {.method = Batching::chunkflow, .micro_batch_tokens = 4, .dp = 2});
  for (const LossNormaliser normaliser : values_of<LossNormaliser>()) {
    const LossWeights of_whole(normaliser, whole), of_cut(normaliser, cut);
    std::map<std::int64_t, double> token_weight;  // by sample
    for (const auto& list : whole.micro_batches)
      for (const MicroBatch& m : list) {
        const auto by_segment = segment_weights(normaliser, m);
        token_weight[m.segments[0].sample] =
            of_whole.of(m) * (by_segment.empty() ? 1 : by_segment[0]);
      }
    std::size_t chunks = 0;
    for (const auto& list : cut.micro_batches)
      for (const MicroBatch& m : list) {
        ASSERT_EQ(m.segments.size(), 1u);
        const auto by_segment = segment_weights(normaliser, m);
        if (m.loss_tokens() == 0) continue;
        EXPECT_NEAR(of_cut.of(m) * (by_segment.empty() ? 1 : by_segment[0]),
                    token_weight.at(m.segments[0].sample), 1e-15)
            << name(normaliser) << " sample " << m.segments[0].sample;
        ++chunks;
      }
    EXPECT_EQ(chunks, 8u);  // the last token of a sample carries no loss
  }
}

TEST(Batch, BadOptionsAreRefused) {
  EXPECT_THROW(plan_batch(0, {}, {Batching::packed, 0, 1, 0}), Error);
  EXPECT_THROW(plan_batch(0, {}, {Batching::none, 1, 0, 0}), Error);
}

}  // namespace
}  // namespace ballast
