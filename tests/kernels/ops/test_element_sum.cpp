// Sums of elements: the same for any cut and order, another for any change.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/ops/element_sum.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

std::vector<float> random_values(std::size_t count) {
  static std::mt19937_64 random(test_seed());
  std::vector<float> values(count);
  for (float& v : values)
    v = static_cast<float>(static_cast<double>(random() >> 11) * 0x1p-53 - 0.5);
  return values;
}

std::uint64_t sum(const std::vector<float>& v) {
  return element_sum(v.data(), DType::f32, 0, static_cast<std::int64_t>(v.size())).sum;
}

TEST(ElementSum, PartsInAnyOrderAddUpToTheWhole) {
  const std::vector<float> v = random_values(1000);
  std::mt19937 random(test_seed());
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<std::size_t> cuts{0, v.size()};
    for (int c = 0; c < 7; ++c) cuts.push_back(random() % v.size());
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) order.push_back(i);
    std::shuffle(order.begin(), order.end(), random);
    ElementSum total;
    for (std::size_t i : order)
      total += element_sum(v.data() + cuts[i], DType::f32, static_cast<std::int64_t>(cuts[i]),
                           static_cast<std::int64_t>(cuts[i + 1] - cuts[i]));
    EXPECT_EQ(total.sum, sum(v));
  }
}

TEST(ElementSum, EveryChangeShows) {
  const std::vector<float> v = random_values(512);
  for (std::size_t i = 0; i < v.size(); ++i) {
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<float> w = v;
      std::uint32_t bits;
      std::memcpy(&bits, &w[i], 4);
      bits ^= 1u << bit;
      std::memcpy(&w[i], &bits, 4);
      ASSERT_NE(sum(w), sum(v)) << "element " << i << " bit " << bit;
    }
    std::vector<float> w = v;
    std::swap(w[i], w[(i + 1) % w.size()]);
    ASSERT_NE(sum(w), sum(v));
    w = v;
    w[i] = 0;
    ASSERT_NE(sum(w), sum(v));
  }
  EXPECT_NE(element_sum(v.data(), DType::f32, 1, 512).sum, sum(v));  // all shifted by one
}

TEST(ElementSum, CountsWhatNoStateHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  const std::vector<double> v{1, nan, -inf, -0.0, -2, inf, 0, 1e-310};
  const ElementSum wide = element_sum(v.data(), DType::f64, 0, 8);
  EXPECT_EQ(wide.nonfinite, 3);
  EXPECT_EQ(wide.negative, 2 + static_cast<int>(std::signbit(nan)));
  const std::vector<float> narrow(v.begin(), v.end());
  EXPECT_EQ(element_sum(narrow.data(), DType::f32, 0, 8).nonfinite, 3);
  const std::uint16_t bf[] = {0x3F80, 0x7F80, 0xFF80, 0x7FC1, 0xBF80, 0x8000};
  const ElementSum half = element_sum(bf, DType::bf16, 0, 6);
  EXPECT_EQ(half.nonfinite, 3);
  EXPECT_EQ(half.negative, 2);
  EXPECT_THROW(element_sum(bf, DType::i32, 0, 1), Error);
}

}  // namespace
}  // namespace ballast
