// What decides a sparse pattern, on small cases that can be followed by hand.
#include <gtest/gtest.h>

#include <cstdint>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"

namespace ballast {
namespace {

/// Words of one head's 64 queries in block 5 of six blocks, by pattern block.
std::vector<std::uint64_t> routed(const Tensor& q, const Tensor& pooled, std::int64_t top_k) {
  const PatternRows at{{0}, {5}, {kBlock}};
  Tensor rows = Tensor::empty({1, 1, 6}, DType::i64);
  route_queries(q, pooled, 1.0, at, top_k, rows);
  std::vector<std::uint64_t> words;
  for (int j = 0; j < 6; ++j)
    words.push_back(static_cast<std::uint64_t>(rows.data<std::int64_t>()[j]));
  return words;
}

TEST(IndexScores, TiesInRoutingGoToTheLowerBlock) {
  constexpr std::uint64_t all = ~std::uint64_t{0};
  Tensor q = Tensor::zeros({kBlock, 1, 16}, DType::f32),
         pooled = Tensor::zeros({6, 1, 16}, DType::f32);
  for (std::int64_t i = 0; i < kBlock; ++i) q.data<float>()[i * 16] = 1;
  using Words = std::vector<std::uint64_t>;
  EXPECT_EQ(routed(q, pooled, 3), (Words{all, all, 0, 0, 0, all})) << "equal scores everywhere";
  pooled.data<float>()[3 * 16] = 2;
  EXPECT_EQ(routed(q, pooled, 3), (Words{all, 0, 0, all, 0, all}))
      << "block 3 wins, blocks 0, 1, 2 and 4 are equal";
  EXPECT_EQ(routed(q, pooled, 1), (Words{0, 0, 0, 0, 0, all})) << "the own block is always in";
  EXPECT_EQ(routed(q, pooled, 9), (Words{all, all, all, all, all, all}));
}

}  // namespace
}  // namespace ballast
