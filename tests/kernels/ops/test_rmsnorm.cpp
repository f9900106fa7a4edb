// RMSNorm against plain fp64 loops, and gradients against central differences.
#include <gtest/gtest.h>

#include "core/model/presets.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "tests/kernels/model/reference_model.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class RmsNormOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, RmsNormOperation, both_types(), type_name_of);

TEST_P(RmsNormOperation, RmsNormFollowsItsFormula) {
  for (const std::int64_t width : {1, 15, 16, 100}) {
    const std::int64_t t = 7;
    const Tensor x = draw.tensor({t, width}, type, 3.0), branch = draw.tensor({t, width}, type),
                 w = draw.tensor({width}, type);
    Tensor y = strided(t, width), sum = Tensor::empty({t, width}, type),
           fused = Tensor::empty({t, width}, type), again = Tensor::empty({t, width}, type);
    Tensor rstd = Tensor::empty({t}, type), fused_rstd = Tensor::empty({t}, type);
    rmsnorm_forward(x, w, 1e-3, y, rstd);
    add_rmsnorm_forward(x, branch, w, 1e-3, sum, fused, fused_rstd);
    const auto expected = [&](const Tensor& input) {
      std::vector<double> out(static_cast<std::size_t>(t * width));
      for (std::int64_t i = 0; i < t; ++i) {
        double squares = 0;
        for (std::int64_t j = 0; j < width; ++j)
          squares += std::pow(element(input, i * width + j), 2);
        for (std::int64_t j = 0; j < width; ++j)
          out[static_cast<std::size_t>(i * width + j)] =
              element(input, i * width + j) /
              std::sqrt(squares / static_cast<double>(width) + 1e-3) * element(w, j);
      }
      return out;
    };
    EXPECT_LT(relative_error(y, expected(x)), tight);
    EXPECT_LT(relative_error(fused, expected(sum)), tight);
    Tensor plain_sum = Tensor::empty({t, width}, type);
    add(x, branch, plain_sum);
    EXPECT_TRUE(bit_equal(sum, plain_sum));
    // Recomputation, and the norm of a sum formed earlier, are the same bits.
    rmsnorm_recompute(sum, fused_rstd, w, again);
    EXPECT_TRUE(bit_equal(again, fused));
    rmsnorm_forward(sum, w, 1e-3, again, rstd);
    EXPECT_TRUE(bit_equal(again, fused) && bit_equal(rstd, fused_rstd));
  }
}

TEST(Gradients, RmsNorm) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const Tensor x = draw.tensor({5, 19}, DType::f64), w = draw.tensor({19}, DType::f64),
               c = draw.tensor({5, 19}, DType::f64);
  Tensor y = Tensor::empty({5, 19}, DType::f64), rstd = Tensor::empty({5}, DType::f64);
  const auto objective = [&] {
    rmsnorm_forward(x, w, 1e-2, y, rstd);
    return dot(y, c);
  };
  objective();
  const Tensor kept = rstd.clone();
  Tensor dx = draw.tensor({5, 19}, DType::f64), more = Tensor::zeros({5, 19}, DType::f64),
         dw = Tensor::zeros({19}, DType::f64);
  rmsnorm_backward(c, x, kept, w, false, dx, dw);
  EXPECT_LT(relative_error(dx, central_differences(x, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(dw, central_differences(w, objective)), kGradientTolerance);
  Tensor again = draw.tensor({19}, DType::f64);
  rmsnorm_backward(c, x, kept, w, true, more, {again, false});
  EXPECT_TRUE(bit_equal(again, dw));
  rmsnorm_backward(c, x, kept, w, true, more, again);
  const auto twice = [](std::vector<double> values) {
    for (double& v : values) v *= 2;
    return values;
  };
  EXPECT_LT(relative_error(more, twice(elements(dx))), 1e-13);
  EXPECT_LT(relative_error(again, twice(elements(dw))), 1e-13);
  rmsnorm_backward(c, x, kept, w, false, more, Tensor());  // a frozen weight
  EXPECT_TRUE(bit_equal(more, dx));
}

TEST_P(RmsNormOperation, RmsNormGradientsAgreeWithDouble) {
  const Tensor x = draw.tensor({9, 70}, type), w = draw.tensor({70}, type),
               dy = draw.tensor({9, 70}, type);
  const auto gradients = [&](DType t) {
    const Tensor a = converted(x, t), b = converted(w, t), g = converted(dy, t);
    Tensor y = Tensor::empty({9, 70}, t), rstd = Tensor::empty({9}, t),
           dx = Tensor::empty({9, 70}, t), dw = Tensor::zeros({70}, t);
    rmsnorm_forward(a, b, 1e-6, y, rstd);
    rmsnorm_backward(g, a, rstd, b, false, dx, dw);
    return std::pair{elements(dx), elements(dw)};
  };
  const auto [dx, dw] = gradients(type);
  const auto [dx_ref, dw_ref] = gradients(DType::f64);
  EXPECT_LT(relative_error(dx, dx_ref), 3e-6);
  EXPECT_LT(relative_error(dw, dw_ref), 3e-6);
}

}  // namespace
}  // namespace ballast
