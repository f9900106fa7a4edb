// Vectorised functions against plain fp64 loops.
#include <gtest/gtest.h>

#include "kernels/ops/vector_math.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

TEST(VectorMath, FastExponential) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  for (int i = 0; i < 20000; ++i) {
    const float x = static_cast<float>(
        -87.0 + 175.0 * (static_cast<double>(draw.integer(0, 1 << 30)) / (1 << 30)));
    const double expected = std::exp(static_cast<double>(x));
    ASSERT_NEAR(host::fast_exp(x) / expected, 1.0, 2e-7) << x;
  }
  EXPECT_EQ(host::fast_exp(0.0f), 1.0f);
  EXPECT_LT(host::fast_exp(-INFINITY), 1e-37f);
  EXPECT_LT(host::fast_exp(-1e30f), 1e-37f);
  EXPECT_TRUE(std::isfinite(host::fast_exp(1e30f)));
  EXPECT_TRUE(std::isnan(host::fast_exp(NAN)));
}

}  // namespace
}  // namespace ballast
