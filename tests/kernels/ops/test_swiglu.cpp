// SwiGLU against plain fp64 loops, and gradients against central differences.
#include <gtest/gtest.h>

#include "kernels/ops/swiglu.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class SwiGluOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, SwiGluOperation, both_types(), type_name_of);

TEST_P(SwiGluOperation, SwiGluFollowsItsFormula) {
  for (const std::int64_t n : {1, 16, 45}) {
    const Tensor x = draw.tensor({6, 2 * n}, type, 4.0);
    Tensor y = Tensor::empty({6, n}, type);
    swiglu_forward(x, y);
    std::vector<double> expected;
    for (std::int64_t i = 0; i < 6; ++i)
      for (std::int64_t j = 0; j < n; ++j) {
        const double g = element(x, i * 2 * n + j);
        expected.push_back(g / (1 + std::exp(-g)) * element(x, i * 2 * n + n + j));
      }
    EXPECT_LT(relative_error(y, expected), tight);
  }
  Tensor extreme = Tensor::zeros({1, 6}, type), y = Tensor::empty({1, 3}, type);
  Tensor d = Tensor::empty({1, 6}, type);
  dispatch_float(type, [&](auto t) {
    auto* p = extreme.data<decltype(t)>();
    p[0] = -200, p[1] = 200, p[2] = -1e4, p[3] = p[4] = p[5] = 1;
  });
  swiglu_forward(extreme, y);
  EXPECT_NEAR(element(y, 0), 0.0, 1e-30);
  EXPECT_NEAR(element(y, 1), 200.0, 1e-4);
  EXPECT_NEAR(element(y, 2), 0.0, 1e-30);
  swiglu_backward(extreme, y, d);
  for (double value : elements(d)) EXPECT_TRUE(std::isfinite(value));
}

TEST(Gradients, SwiGlu) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const Tensor x = draw.tensor({4, 22}, DType::f64, 2.0), c = draw.tensor({4, 11}, DType::f64);
  Tensor y = Tensor::empty({4, 11}, DType::f64), dx = Tensor::empty({4, 22}, DType::f64);
  swiglu_backward(x, c, dx);
  EXPECT_LT(
      relative_error(dx, central_differences(x, [&] { return swiglu_forward(x, y), dot(y, c); })),
      kGradientTolerance);
  Tensor in_place = x.clone(), again = Tensor::empty({4, 11}, DType::f64);
  swiglu_forward(x, y);
  swiglu_backward(in_place, c, in_place, again);
  EXPECT_TRUE(bit_equal(in_place, dx));
  EXPECT_TRUE(bit_equal(again, y));
  const Tensor single = converted(x, DType::f32);
  Tensor d_single = Tensor::empty({4, 22}, DType::f32);
  swiglu_backward(single, converted(c, DType::f32), d_single);
  EXPECT_LT(relative_error(d_single, dx), 2e-6);
}

}  // namespace
}  // namespace ballast
