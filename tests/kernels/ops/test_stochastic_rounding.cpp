// Rounding by chance: to a neighbour, right on average, the same bits for the same element and
// step.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include "kernels/ops/adamw.hpp"
#include "kernels/ops/stochastic_rounding.hpp"
#include "tests/kernels/ops/numeric.hpp"

namespace ballast {
namespace {

float wide(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
std::uint16_t rounded(float x, std::uint32_t random) {
  return round_by_chance(std::bit_cast<std::uint32_t>(x), random);
}

TEST(StochasticRounding, GoesToANeighbourAndIsRightOnAverage) {
  numeric::Draw draw;
  SCOPED_TRACE(draw.trace());
  constexpr int kDraws = 1 << 16;
  for (int n = 0; n < 40; ++n) {
    const auto power = static_cast<double>(draw.integer(-30, 30));
    const auto x = static_cast<float>(draw.normal() * std::pow(10.0, power));
    const std::uint32_t cut = std::bit_cast<std::uint32_t>(x) & 0xFFFF0000u;
    const double low = std::bit_cast<float>(cut), high = std::bit_cast<float>(cut + 0x10000u),
                 step = std::fabs(high - low);
    const std::uint32_t key = rounding_key(draw.integer(1, 1000000));
    double sum[2] = {};  // by the lower and by the upper half of the bits
    for (int i = 0; i < kDraws; ++i) {
      const std::uint32_t random = rounding_bits(key, i);
      const double halves[2] = {wide(rounded(x, random)), wide(rounded(x, random >> 16))};
      for (int h = 0; h < 2; ++h) {
        ASSERT_TRUE(halves[h] == low || halves[h] == high) << x;
        sum[h] += (halves[h] - x) / step;
      }
    }
    // Five standard deviations of a mean of kDraws terms of variance 1/4 at most.
    for (const double s : sum) EXPECT_LT(std::fabs(s), 5 * 0.5 * std::sqrt(kDraws)) << x;
  }
}

TEST(StochasticRounding, WhatIsBf16AlreadyStays) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const std::uint16_t found = round_by_chance(bits << 16, 0xFFFFu);
    if (std::isnan(wide(static_cast<std::uint16_t>(bits))))
      EXPECT_TRUE(std::isnan(wide(found)));
    else
      EXPECT_EQ(found, bits);
  }
  const float nan = std::bit_cast<float>(0x7F800001u);  // whose upper half is an infinity
  EXPECT_TRUE(std::isnan(wide(rounded(nan, 0))));
  EXPECT_TRUE(std::isnan(wide(rounded(nan, 0xFFFFu))));
}

// Both moments of an element lie between two bf16 numbers; whether they go up tells nothing of one
// another.
TEST(StochasticRounding, MomentsOfAnElementAreRoundedApart) {
  constexpr std::int64_t kCount = 1 << 16;
  const auto of = [](DType type, float value) {
    Tensor t = Tensor::zeros({kCount}, type);
    if (value != 0) std::fill_n(t.data<float>(), kCount, value);
    return t;
  };
  AdamWState state{of(DType::f32, 0), of(DType::bf16, 0), of(DType::bf16, 0),
                   Tensor::zeros({2}, DType::i64)};
  Tensor values = of(DType::f32, 0);
  AdamWOptions options;
  options.bf16_moments = true;
  adamw_step(state, of(DType::f32, 1), 1, 1e-3, 7, options, values);
  double up[2] = {}, both = 0;
  for (std::int64_t i = 0; i < kCount; ++i) {
    const bool first = wide(state.moment1.data<bf16>()[i].bits) > 0.1f,
               second = wide(state.moment2.data<bf16>()[i].bits) > 0.05f;
    up[0] += first, up[1] += second, both += first && second;
  }
  const double p = up[0] / kCount, q = up[1] / kCount;
  for (const double share : {p, q}) EXPECT_NEAR(share, 0.8, 0.01);
  EXPECT_LT(std::abs(both / kCount - p * q) / std::sqrt(p * (1 - p) * q * (1 - q)), 0.02);
}

TEST(StochasticRounding, ElementsAndStepsDiffer) {
  std::set<std::uint32_t> seen;
  const std::int64_t far = std::int64_t{1} << 32;
  for (std::int64_t step = 1; step <= 50; ++step)
    for (const std::int64_t at : {std::int64_t{0}, std::int64_t{1}, far, far + 1})
      seen.insert(rounding_bits(rounding_key(step), at));
  EXPECT_EQ(seen.size(), 200u);
}

}  // namespace
}  // namespace ballast
