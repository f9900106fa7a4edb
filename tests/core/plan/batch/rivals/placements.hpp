// What every placement planned for comparison keeps to, on lengths with a long tail.
#pragma once
#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <vector>

#include "core/plan/batch/placement.hpp"
#include "tests/core/plan/batch/long_tailed_lengths.hpp"
#include "tests/core/plan/batch/placement_splits.hpp"

namespace ballast {

inline std::vector<SampleLength> samples_of(const std::vector<std::int64_t>& lengths) {
  std::vector<SampleLength> samples;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    samples.push_back({static_cast<std::int64_t>(i), lengths[i], lengths[i]});
  return samples;
}

/// 16K tokens of a rank, Ulysses groups of any size that balanced may take.
inline PlacementOptions options_of(int ranks) {
  PlacementOptions options;
  options.ranks = ranks;
  options.splits = placement_splits(ranks, 32, 8);
  options.micro_batch_tokens = 16384;
  options.memory_bytes = 16384;
  return options;
}

/// Every sample once and whole, aligned groups of 2^k ranks that have the memory, lists that agree,
/// and no step shorter than its bound.
inline void expect_sound(const Placement& placed, const std::vector<SampleLength>& samples,
                         const PlacementOptions& options) {
  std::map<std::int64_t, std::int64_t> tokens;
  std::vector<std::vector<int>> lists(static_cast<std::size_t>(options.ranks));
  for (std::size_t id = 0; id < placed.micro_batches.size(); ++id) {
    const PlacedMicroBatch& m = placed.micro_batches[id];
    ASSERT_FALSE(m.segments.empty());
    EXPECT_TRUE(std::has_single_bit(static_cast<unsigned>(m.split.ranks)));
    EXPECT_EQ(m.split.sp * m.split.ring, m.split.ranks);
    EXPECT_EQ(m.first % m.split.ranks, 0);
    ASSERT_LE(m.first + m.split.ranks, options.ranks);
    std::int64_t held = 0;
    for (const Segment& s : m.segments) {
      tokens[s.sample] += s.tokens(), held += s.tokens();
      EXPECT_EQ(s.begin, 0);
    }
    EXPECT_LE(held, options.micro_batch_tokens * m.split.ranks);
    for (int r = m.first; r < m.first + m.split.ranks; ++r)
      lists[static_cast<std::size_t>(r)].push_back(static_cast<int>(id));
  }
  EXPECT_EQ(placed.ranks, lists);
  ASSERT_EQ(tokens.size(), samples.size());
  for (const SampleLength& s : samples) EXPECT_EQ(tokens[s.sample], s.tokens);
  EXPECT_GE(placed.step_s, placed.bound_s * (1 - 1e-9));
}

}  // namespace ballast
