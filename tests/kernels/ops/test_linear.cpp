// Linear layers against plain fp64 loops, and their gradients against central differences.
#include <gtest/gtest.h>

#include "kernels/ops/linear.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class LinearOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, LinearOperation, both_types(), type_name_of);

TEST_P(LinearOperation, LinearIsThreeLoops) {
  for (const auto& [t, in, out] : {std::tuple{1, 1, 1}, {5, 3, 8}, {37, 65, 18}, {0, 4, 3}}) {
    const Tensor x = strided(t, in), w = draw.tensor({out, in}, type), b = draw.tensor({out}, type),
                 dy = strided(t, out);
    Tensor y = strided(t, out), plain = strided(t, out), dx = strided(t, in),
           dw = draw.tensor({out, in}, type), db = draw.tensor({out}, type);
    std::vector<double> y_ref(t * out), plain_ref(t * out), dx_ref(t * in, 0.0),
        dw_ref = elements(dw), db_ref = elements(db);
    for (int i = 0; i < t; ++i)
      for (int o = 0; o < out; ++o) {
        for (int k = 0; k < in; ++k) {
          plain_ref[i * out + o] += element(x, i * in + k) * element(w, o * in + k);
          dx_ref[i * in + k] += element(dy, i * out + o) * element(w, o * in + k);
          dw_ref[o * in + k] += element(dy, i * out + o) * element(x, i * in + k);
        }
        y_ref[i * out + o] = plain_ref[i * out + o] + element(b, o);
        db_ref[o] += element(dy, i * out + o);
      }
    linear_forward(x, w, b, y);
    linear_forward(x, w, {}, plain);
    linear_input_gradient(dy, w, dx);
    linear_weight_gradient(x, dy, dw);
    linear_bias_gradient(dy, db);
    EXPECT_LT(rms_error(y, y_ref), 3 * tight);
    EXPECT_LT(rms_error(plain, plain_ref), 3 * tight);
    EXPECT_LT(rms_error(dx, dx_ref), 3 * tight);
    EXPECT_LT(rms_error(dw, dw_ref), 3 * tight);
    EXPECT_LT(rms_error(db, db_ref), 3 * tight);
  }
}

TEST_P(LinearOperation, ProductsAreScaledAndAdded) {
  const Tensor x = strided(5, 7), w = draw.tensor({4, 7}, type), dy = strided(5, 4);
  Tensor y = strided(5, 4), dx = strided(5, 7), plain_y = strided(5, 4), plain_dx = strided(5, 7);
  const std::vector<double> y_before = elements(y), dx_before = elements(dx);
  linear_forward(x, w, {}, plain_y);
  linear_input_gradient(dy, w, plain_dx);
  linear_forward(x, w, {}, y, {.scale = 0.75, .accumulate = true});
  linear_input_gradient(dy, w, dx, {.scale = -1.5, .accumulate = true});
  for (std::int64_t i = 0; i < y.numel(); ++i)
    EXPECT_NEAR(element(y, i), y_before[i] + 0.75 * element(plain_y, i), 1e-5);
  for (std::int64_t i = 0; i < dx.numel(); ++i)
    EXPECT_NEAR(element(dx, i), dx_before[i] - 1.5 * element(plain_dx, i), 1e-5);
  linear_forward(x, w, {}, y, {.scale = 0.75});
  linear_input_gradient(dy, w, dx, {.scale = -1.5});
  for (std::int64_t i = 0; i < y.numel(); ++i)
    EXPECT_NEAR(element(y, i), 0.75 * element(plain_y, i), 1e-5);
  for (std::int64_t i = 0; i < dx.numel(); ++i)
    EXPECT_NEAR(element(dx, i), -1.5 * element(plain_dx, i), 1e-5);
  EXPECT_THROW(linear_forward(x, w, draw.tensor({4}, type), y, {.accumulate = true}), Error);
}

TEST_P(LinearOperation, LinearLeavesWhatLiesBetweenRows) {
  Tensor wide = draw.tensor({4, 12}, type);
  const Tensor kept = wide.clone();
  Tensor y = wide.narrow(1, 3, 8);
  linear_forward(draw.tensor({4, 6}, type), draw.tensor({5, 6}, type), draw.tensor({5}, type), y);
  EXPECT_TRUE(relative_error(wide.narrow(1, 0, 3), kept.narrow(1, 0, 3)) == 0 &&
              relative_error(wide.narrow(1, 8, 12), kept.narrow(1, 8, 12)) == 0);
}

}  // namespace
}  // namespace ballast
