// Gradients that are kept in bf16: every operation that makes one leaves the nearest bf16 of the
// sum that it leaves in full, stored or added.
#include <gtest/gtest.h>

#include <array>

#include "core/base/bf16.hpp"
#include "kernels/ops/adamw.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/embedding.hpp"
#include "kernels/ops/fp8.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/qk_norm.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/workspace.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class Bf16Gradient : public OperationTest {
 protected:
  Tensor rounded(const Tensor& from) {
    Tensor to = Tensor::empty(from.shape(), DType::bf16);
    for (std::int64_t i = 0; i < from.numel(); ++i)
      to.data<bf16>()[i].bits = to_bf16_bits(static_cast<float>(element(from, i)));
    return to;
  }
  /// `run` leaves its gradient of this shape in a target of either type.
  template <class F>
  void expect_rounded(const char* what, const Shape& shape, const F& run) {
    for (const bool accumulate : {false, true}) {
      const Tensor half = rounded(draw.tensor(shape, type)), full = converted(half, type);
      run(GradientTarget{full, accumulate});
      run(GradientTarget{half, accumulate});
      const Tensor nearest = rounded(full);
      std::int64_t unlike = 0;  // where the order of a product's sums decides
      for (std::int64_t i = 0; i < half.numel(); ++i) {
        ASSERT_NEAR(element(half, i), element(nearest, i), std::abs(element(nearest, i)) / 64)
            << what << " " << i;
        unlike += element(half, i) != element(nearest, i);
      }
      EXPECT_LE(unlike, half.numel() / 50) << what;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Types, Bf16Gradient, both_types(), type_name_of);

TEST_P(Bf16Gradient, IsTheNearestToTheSum) {
  const std::int64_t t = 60, in = 700, out = 130;  // several blocks of rows of the weight
  const Tensor x = draw.tensor({t, in}, type), dy = strided(t, out), ids = draw.integers({t}, 0, 6),
               dense = draw.tensor({t, in}, type), w = draw.tensor({in}, type),
               rstd = draw.tensor({t}, type, 0.1, 1);
  expect_rounded("weight", {out, in},
                 [&](const GradientTarget& to) { linear_weight_gradient(x, dy, to); });
  expect_rounded("bias", {out}, [&](const GradientTarget& to) { linear_bias_gradient(dy, to); });
  expect_rounded("embedding", {7, in},
                 [&](const GradientTarget& to) { embedding_weight_gradient(ids, x, to); });
  expect_rounded("norm", {in}, [&](const GradientTarget& to) {
    Tensor dx = Tensor::empty({t, in}, type);
    rmsnorm_backward(dense, x, rstd, w, false, dx, to);
  });
  const std::int64_t dim = 16, heads = 3;
  const Tensor dq = draw.tensor({t, 2, dim}, type), dk = draw.tensor({t, 1, dim}, type),
               qkv = draw.tensor({t, heads + 1, dim}, type), cos = draw.tensor({t, dim / 2}, type),
               sin = draw.tensor({t, dim / 2}, type), d_other = draw.tensor({dim}, type);
  const QkNormWeights norms{draw.tensor({dim}, type), draw.tensor({dim}, type), 1e-6};
  for (const bool query : {true, false})
    expect_rounded("QK-norm", {dim}, [&](const GradientTarget& to) {
      Tensor d = Tensor::empty({t, (heads + 1) * dim}, type);
      const GradientTarget other(d_other.clone());
      qk_norm_rope_backward(dq, dk, dk, qkv, norms, cos, sin, d, query ? to : other,
                            query ? other : to);
    });
}

TEST_P(Bf16Gradient, NoTokensStoreZeros) {
  Tensor half = rounded(draw.tensor({5, 8}, type));
  linear_weight_gradient(draw.tensor({0, 8}, type), draw.tensor({0, 5}, type), {half, false});
  for (std::int64_t i = 0; i < half.numel(); ++i) EXPECT_EQ(element(half, i), 0);
}

TEST_P(Bf16Gradient, IsWhatAdamWAndNormAndShardsTake) {
  const std::int64_t n = 9001;
  const Tensor half = rounded(draw.tensor({n}, type)), full = converted(half, type),
               start = draw.tensor({n}, type);
  const auto updated = [&](const Tensor& gradient) {
    Tensor decay = Tensor::empty({2}, DType::i64);
    decay.data<std::int64_t>()[0] = 5, decay.data<std::int64_t>()[1] = 6000;
    AdamWState state{start.clone(), Tensor::zeros({n}, type), Tensor::zeros({n}, type), decay};
    Tensor values = start.clone();
    adamw_step(state, gradient, 0.5, 1e-2, 1, {}, values);
    return values;
  };
  EXPECT_TRUE(bit_equal(updated(half), updated(full)));
  EXPECT_DOUBLE_EQ(sum_of_squares(half), sum_of_squares(full));
  Tensor sum = start.clone(), expected = start.clone(), copy = Tensor::empty({n}, type);
  add(sum, half, sum);
  add(expected, full, expected);
  EXPECT_TRUE(bit_equal(sum, expected));
  const Tensor other_half = rounded(start);
  Tensor half_sum = rounded(start), wide = converted(other_half, type);
  add(half_sum, half, half_sum);  // of two copies
  add(wide, full, wide);
  EXPECT_TRUE(bit_equal(half_sum, rounded(wide)));
  copy_rows(half, copy);
  EXPECT_TRUE(bit_equal(copy, full));
  const Tensor other = Tensor::zeros({n}, type == DType::f64 ? DType::f32 : DType::f64);
  EXPECT_THROW(updated(other), Error);
}

}  // namespace
}  // namespace ballast
