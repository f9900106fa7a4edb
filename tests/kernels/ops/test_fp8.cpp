// FP8 products: rounding against a list of all E4M3 values, scales, products against fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/model/fp8_specs.hpp"
#include "kernels/ops/fp8.hpp"
#include "kernels/ops/linear.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using numeric::Draw;

double uniform(Draw& draw, double low, double high) {
  constexpr std::int64_t kSteps = std::int64_t{1} << 40;
  return low +
         (high - low) * static_cast<double>(draw.integer(0, kSteps)) / static_cast<double>(kSteps);
}

/// All finite values of sign, four exponent bits (bias 7) and three mantissa bits.
std::vector<double> all_e4m3() {
  std::vector<double> values;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    const double v =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 7 - 3);
    values.push_back(v);
    values.push_back(-v);
  }
  return values;
}

TEST(Fp8, RoundsToTheNearestValueAndTiesToEven) {
  const std::vector<double> values = all_e4m3();
  EXPECT_EQ(*std::max_element(values.begin(), values.end()), 448);
  for (const double v : values) EXPECT_EQ(host::nearest_e4m3(static_cast<float>(v)), v);
  Draw draw;
  SCOPED_TRACE(draw.trace());
  for (int i = 0; i < 20000; ++i) {
    const auto x = static_cast<float>(uniform(draw, -448, 448) * std::exp2(-uniform(draw, 0, 20)));
    const double got = host::nearest_e4m3(x);
    double best = 1e30;
    for (const double v : values) best = std::min(best, std::fabs(v - x));
    EXPECT_EQ(std::fabs(got - x), best) << x;
  }
  EXPECT_EQ(host::nearest_e4m3(17.0f), 16);  // between 16 and 18: even mantissa
  EXPECT_EQ(host::nearest_e4m3(19.0f), 20);
  EXPECT_EQ(host::nearest_e4m3(0x1p-10f), 0);  // half of the least value
  EXPECT_EQ(host::nearest_e4m3(0x3p-10f), 0x1p-8f);
  EXPECT_TRUE(std::isnan(host::nearest_e4m3(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(host::nearest_e4m3(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Fp8, ScalesAreTheLeastPowersOfTwoThatHoldTheBlock) {
  EXPECT_EQ(host::fp8_scale(0), 1);
  EXPECT_EQ(host::fp8_scale(448), 1);
  EXPECT_EQ(host::fp8_scale(std::nextafter(448.0f, 1e9f)), 2);
  EXPECT_EQ(host::fp8_scale(std::nextafter(448.0f, 0.0f)), 1);
  EXPECT_EQ(host::fp8_scale(224), 0.5);
  EXPECT_EQ(host::fp8_scale(1e-44f), 0x1p-126f);
  EXPECT_EQ(host::fp8_scale(std::numeric_limits<float>::infinity()), 1);
  Draw draw;
  SCOPED_TRACE(draw.trace());
  for (int i = 0; i < 5000; ++i) {
    const auto amax = static_cast<float>(std::exp2(uniform(draw, -100, 100)));
    const float scale = host::fp8_scale(amax);
    EXPECT_LE(amax, 448.0 * scale);
    EXPECT_GT(amax, 224.0 * scale);
  }
}

struct Matrices {
  Tensor x, w, bias, dy;
};
Matrices draw_matrices(Draw& draw, std::int64_t tokens, std::int64_t in, std::int64_t out) {
  return {draw.tensor({tokens, in}, DType::f32), draw.tensor({out, in}, DType::f32),
          draw.tensor({out}, DType::f32), draw.tensor({tokens, out}, DType::f32)};
}

double relative(const Tensor& got, const Tensor& wanted) {
  double error = 0, size = 0;
  for (std::int64_t i = 0; i < wanted.numel(); ++i) {
    const double g = got.data<float>()[i], w = wanted.data<float>()[i];
    error += (g - w) * (g - w);
    size += w * w;
  }
  return std::sqrt(error / size);
}

TEST(Fp8, ProductsAreNearThoseOfTheOperands) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  // A block cut short on every side; one token; more tokens than a block.
  for (const std::int64_t tokens : {1, 77, 300}) {
    const Matrices m = draw_matrices(draw, tokens, 144, 272);
    Workspace workspace(host_device());
    Fp8Weight w = fp8_weight_memory(272, 144, DType::f32, host_device());
    fp8_round_weight(m.w, w);
    Tensor y = Tensor::empty({tokens, 272}, DType::f32), y_wanted = y.clone();
    fp8_linear_forward(fp8_round(m.x, Fp8Sides::rows, "x", workspace), w, m.bias, y, workspace);
    linear_forward(m.x, m.w, m.bias, y_wanted);
    Tensor dx = Tensor::empty({tokens, 144}, DType::f32), dx_wanted = dx.clone();
    const Fp8Tokens dy = fp8_round(m.dy, Fp8Sides::both, "dy", workspace);
    fp8_linear_input_gradient(dy, w, dx, workspace);
    linear_input_gradient(m.dy, m.w, dx_wanted);
    Tensor dw = draw.tensor({272, 144}, DType::f32), dw_wanted = dw.clone();
    const Fp8Tokens x = fp8_round(m.x, Fp8Sides::columns, "x", workspace);
    fp8_linear_weight_gradient(x, dy, dw);
    linear_weight_gradient(m.x, m.dy, dw_wanted);
    // Each operand is rounded by up to 1/16, 2.6 % in the mean square at three mantissa bits.
    for (const double error : {relative(y, y_wanted), relative(dx, dx_wanted)}) {
      EXPECT_LT(error, 0.05);
      EXPECT_GT(error, 0.01);  // and it was rounded
    }
    EXPECT_LT(relative(dw, dw_wanted), 0.05);
    Tensor first = dw.clone();
    fp8_linear_weight_gradient(x, dy, {first, false});
    fp8_linear_weight_gradient(x, dy, {first, true});
    Tensor once = dw.clone();
    fp8_linear_weight_gradient(x, dy, {once, false});
    for (std::int64_t i = 0; i < once.numel(); ++i)
      EXPECT_NEAR(first.data<float>()[i], 2 * once.data<float>()[i], 1e-4);
  }
}

TEST(Fp8, ATokenAloneDecidesItsRowAndBlocksDecideTheirColumns) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Workspace workspace(host_device());
  Tensor x = draw.tensor({256, 256}, DType::f32);
  const Tensor before = fp8_round(x, Fp8Sides::both, "x", workspace).rows.clone();
  const Tensor columns = fp8_round(x, Fp8Sides::columns, "x", workspace).columns.clone();
  x.data<float>()[130 * 256 + 5] = 1000;  // second block of tokens, first of columns
  const Fp8Tokens after = fp8_round(x, Fp8Sides::both, "x", workspace);
  for (std::int64_t r = 0; r < 256; ++r)
    for (std::int64_t c = 0; c < 256; ++c) {
      const std::int64_t i = r * 256 + c;
      if (r != 130 || c >= 128) EXPECT_EQ(before.data<float>()[i], after.rows.data<float>()[i]);
      if (r < 128 || c != 5) EXPECT_EQ(columns.data<float>()[i], after.columns.data<float>()[i]);
    }
  // What is not finite reaches every product of its row.
  x.data<float>()[3 * 256] = std::numeric_limits<float>::infinity();
  const Fp8Tokens infinite = fp8_round(x, Fp8Sides::rows, "x", workspace);
  for (std::int64_t c = 0; c < 256; ++c)
    EXPECT_EQ(std::isnan(infinite.rows.data<float>()[3 * 256 + c]), c < 128) << c;
}

TEST(Fp8, SidesThatCublasCannotTakeAreRefused) {
  EXPECT_THROW(fp8_weight_memory(100, 144, DType::f32, host_device()), Error);
  ModelShape shape{.layers = 1,
                   .hidden = 64,
                   .intermediate = 128,
                   .query_heads = 4,
                   .kv_heads = 2,
                   .head_dim = 16,
                   .vocabulary = 256};
  EXPECT_EQ(fp8_misfit(shape), 0);
  shape.intermediate = 100;
  EXPECT_EQ(fp8_misfit(shape), 200);
}

}  // namespace
}  // namespace ballast
