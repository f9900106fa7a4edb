// Chunk construction (ChunkFlow Algorithm 1): every token once, the fewest chunks, dependent chunks
// together.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <random>

#include "core/base/error.hpp"
#include "core/plan/batch/batch_plan.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/batch/chunking.hpp"
#include "core/plan/batch/packing.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

/// Fewest bins by trying everything.
int exhaustive_bins(const std::vector<std::int64_t>& lengths, std::int64_t capacity) {
  int best = static_cast<int>(lengths.size());
  std::vector<std::int64_t> room;
  const std::function<void(std::size_t)> place = [&](std::size_t i) {
    if (static_cast<int>(room.size()) >= best) return;
    if (i == lengths.size()) {
      best = static_cast<int>(room.size());
      return;
    }
    for (std::size_t b = 0; b < room.size(); ++b)
      if (room[b] >= lengths[i]) {
        room[b] -= lengths[i];
        place(i + 1);
        room[b] += lengths[i];
      }
    room.push_back(capacity - lengths[i]);
    place(i + 1);
    room.pop_back();
  };
  place(0);
  return best;
}

TEST(Chunk, FewestBinsOfSmallSetsAreOptimal) {
  const unsigned seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 300 && !::testing::Test::HasFailure(); ++trial) {
    const std::int64_t capacity = 5 + random() % 40;
    std::vector<std::int64_t> lengths(1 + random() % 8);
    for (auto& n : lengths) n = 1 + random() % capacity;
    const auto bins = fewest_bins(lengths, capacity);
    std::vector<int> seen(lengths.size(), 0);
    for (const auto& bin : bins) {
      std::int64_t sum = 0;
      for (const auto i : bin) {
        ++seen[i];
        sum += lengths[i];
      }
      EXPECT_LE(sum, capacity);
    }
    EXPECT_EQ(seen, std::vector<int>(lengths.size(), 1));
    const int optimum = exhaustive_bins(lengths, capacity);
    EXPECT_EQ(static_cast<int>(bins.size()), optimum);
    EXPECT_LE(least_bins(lengths, capacity), optimum);
  }
}

TEST(Chunk, SearchBeatsBestFitDecreasing) {
  const std::vector<std::int64_t> lengths{3, 3, 2,
                                          2, 2, 2};  // best fit decreasing joins the two longest
  EXPECT_EQ(pack_lengths(PackMethod::bfd, lengths, 7).size(), 3u);
  EXPECT_EQ(fewest_bins(lengths, 7).size(), 2u);
}

TEST(Chunk, EmptyLengthsShareTheFirstBin) {
  for (const std::size_t full : {0, 3, 65}) {
    std::vector<std::int64_t> lengths{0, 0};
    lengths.resize(2 + full, 10);
    lengths.push_back(0);
    const auto bins = fewest_bins(lengths, 10);
    ASSERT_EQ(bins.size(), std::max<std::size_t>(1, full));
    EXPECT_EQ(bins.front().size(), full == 0 ? 3u : 4u);
  }
}

TEST(Chunk, EveryTokenOnceAndGroupsTogether) {
  const unsigned seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int trial = 0; trial < 200 && !::testing::Test::HasFailure(); ++trial) {
    std::vector<SampleLength> samples(1 + random() % 60);
    const std::int64_t chunk = 1 + random() % 50;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const std::int64_t n = random() % 5 == 0 ? random() % 500 : random() % 20;
      samples[i] = {static_cast<std::int64_t>(100 + i), n, std::max<std::int64_t>(0, n - 1)};
    }
    BatchingOptions options;
    options.method = Batching::chunkflow;
    options.micro_batch_tokens = chunk;
    options.dp = 1 + static_cast<int>(random() % 4);
    const Batch batch = plan_batch(0, samples, options);
    EXPECT_EQ(batch.samples(), static_cast<std::int64_t>(samples.size()));
    std::vector<std::int64_t> reached(samples.size(), 0), loss(samples.size(), 0);
    for (const auto& list : batch.micro_batches) {
      chunk_groups(list);  // throws where dependent chunks are apart
      for (const MicroBatch& m : list) {
        EXPECT_LE(m.tokens(), chunk);
        for (const Segment& s : m.segments) {
          EXPECT_EQ(s.begin, reached[s.sample - 100]);
          reached[s.sample - 100] = s.end;
          EXPECT_GE(s.loss_tokens, 0);
          const SampleLength& whole = samples[s.sample - 100];
          if (whole.loss_tokens == whole.tokens - 1) {
            EXPECT_EQ(s.loss_tokens,
                      s.end - s.begin - (s.end == whole.tokens ? 1 : 0));  // no mask: exact
          }
          loss[s.sample - 100] += s.loss_tokens;
        }
      }
    }
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(reached[i], samples[i].tokens);
      EXPECT_EQ(loss[i], samples[i].loss_tokens);
    }
    EXPECT_EQ(batch.micro_batches, plan_batch(0, samples, options).micro_batches);
  }
}

TEST(Chunk, PaddingBetweenSegmentsCountsAgainstTheChunk) {
  BatchingOptions options;
  options.method = Batching::chunkflow;
  options.micro_batch_tokens = 512;
  options.align = 64;
  std::vector<SampleLength> samples;
  for (std::int64_t i = 0; i < 64; ++i) samples.push_back({i, 8, 7});
  samples.push_back({64, 1300, 1299});
  std::int64_t tokens = 0;
  for (const auto& list : plan_batch(0, samples, options).micro_batches)
    for (const MicroBatch& m : list) {
      EXPECT_LE(m.axis_tokens(), 512);
      tokens += m.tokens();
    }
  EXPECT_EQ(tokens, 64 * 8 + 1300);
}

TEST(Chunk, FigureTwoOfThePaper) {
  const std::vector<SampleLength> samples{{0, 4, 0}, {1, 2, 0}, {2, 1, 0}, {3, 1, 0}};
  EXPECT_EQ(chunk_groups(construct_chunks(samples, 2)), (ChunkGroups{{0, 1}, {2}, {3}}));
  EXPECT_EQ(construct_chunks(samples, 4).size(), 2u);
}

TEST(ChunkSlow, AMillionLengths) {
  std::mt19937 random(1);
  std::vector<SampleLength> samples(1000000);
  for (std::size_t i = 0; i < samples.size(); ++i)
    samples[i] = {static_cast<std::int64_t>(i),
                  static_cast<std::int64_t>(random() % (random() % 100 == 0 ? 60000 : 1024)), 0};
  const auto begin = std::chrono::steady_clock::now();
  const auto chunks = construct_chunks(samples, 8192);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_LT(seconds, 5.0);  // 0.5 s on a free core
  std::int64_t tokens = 0, short_tokens = 0;
  for (const auto& s : samples) {
    tokens += s.tokens;
    if (s.tokens <= 8192) short_tokens += s.tokens;
  }
  std::int64_t held = 0, standalone = 0;
  for (const auto& c : chunks) {
    held += c.tokens();
    if (c.segments.size() > 1) ++standalone;
  }
  EXPECT_EQ(held, tokens);
  EXPECT_LE(standalone, short_tokens / 8192 + short_tokens / 819200 + 2);
}

TEST(Chunk, BadInput) {
  EXPECT_THROW(construct_chunks({{0, 4, 0}}, 0), Error);
  EXPECT_THROW(construct_chunks({{0, -1, 0}}, 4), Error);
  EXPECT_THROW(fewest_bins(std::vector<std::int64_t>{5}, 4), Error);
  EXPECT_TRUE(construct_chunks({}, 4).empty());
}

}  // namespace
}  // namespace ballast
