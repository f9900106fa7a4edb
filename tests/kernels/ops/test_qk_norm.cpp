// QK-norm and rotation in one pass against the two operations one after the other, and gradients
// against central differences.
#include <gtest/gtest.h>

#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/qk_norm.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class QkNormOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, QkNormOperation, both_types(), type_name_of);

struct Angles {
  Tensor cos, sin;
  Angles(Draw& draw, std::int64_t tokens, std::int64_t dim, DType type)
      : cos(Tensor::empty({tokens, dim / 2}, type)), sin(Tensor::empty({tokens, dim / 2}, type)) {
    ModelShape shape;
    shape.head_dim = dim;
    shape.rope_theta = 1e4;
    rope_table(draw.integers({tokens}, 0, 100000), rope_frequencies(shape), cos, sin);
  }
};

/// Heads of [T, heads, D] normed one by one, then turned.
Tensor in_two_steps(const Tensor& x, std::int64_t queries, const QkNormWeights& w,
                    const Angles& angles) {
  const std::int64_t tokens = x.size(0), heads = x.size(1), dim = x.size(2);
  Tensor y = Tensor::empty({tokens, heads, dim}, x.dtype()),
         one = Tensor::empty({tokens, dim}, x.dtype()),
         normed = Tensor::empty({tokens, dim}, x.dtype()),
         rstd = Tensor::empty({tokens}, x.dtype());
  for (std::int64_t h = 0; h < heads; ++h) {
    Tensor from = one.reshape({tokens, 1, dim}), to = y.narrow(1, h, h + 1);
    copy_rows(x.narrow(1, h, h + 1), from);
    rmsnorm_forward(one, h < queries ? w.q : w.k, w.eps, normed, rstd);
    copy_rows(normed.reshape({tokens, 1, dim}), to);
  }
  rope_apply(y, heads, {}, angles.cos, angles.sin);
  return y;
}

TEST_P(QkNormOperation, IsTheNormOfEveryHeadAndThenTheRotation) {
  for (const auto& [queries, keys, dim] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{3, 1, 64}, {4, 4, 10}, {1, 1, 2}}) {
    const std::int64_t tokens = 9, heads = queries + keys;
    const Angles angles(draw, tokens, dim, type);
    const QkNormWeights w{draw.tensor({dim}, type), draw.tensor({dim}, type), 1e-3};
    // A slice of wider rows, as q, k and v lie.
    const Tensor wide = draw.tensor({tokens, heads + keys, dim}, type);
    Tensor y = Tensor::empty({tokens, heads, dim}, type);
    qk_norm_rope(wide, queries, w, angles.cos, angles.sin, y);
    EXPECT_LT(relative_error(y, in_two_steps(wide.narrow(1, 0, heads), queries, w, angles)), tight);
  }
}

TEST_P(QkNormOperation, GradientsDoNotDependOnWhatTheyAreAddedTo) {
  const std::int64_t tokens = 700, queries = 2, keys = 1, dim = 16, heads = 3;
  const Angles angles(draw, tokens, dim, type);
  const QkNormWeights w{draw.tensor({dim}, type), draw.tensor({dim}, type), 1e-6};
  const Tensor x = draw.tensor({tokens, heads + keys, dim}, type),
               dq = draw.tensor({tokens, queries, dim}, type),
               dk = draw.tensor({tokens, keys, dim}, type),
               dv = draw.tensor({tokens, keys, dim}, type);
  const auto gradients = [&](bool accumulate, const Tensor& before) {
    Tensor d = Tensor::empty({tokens, (heads + keys) * dim}, type), d_q = before.clone(),
           d_k = before.clone();
    qk_norm_rope_backward(dq, dk, dv, x, w, angles.cos, angles.sin, d, {d_q, accumulate},
                          {d_k, accumulate});
    return std::array{d, d_q, d_k};
  };
  const Tensor seven = draw.tensor({dim}, type, 7.0, 7.0), zero = Tensor::zeros({dim}, type);
  const auto once = gradients(false, seven), added = gradients(true, zero);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(bit_equal(once[i], added[i])) << i;
  // Frozen weights change nothing else, and v passes.
  Tensor frozen = Tensor::empty(once[0].shape(), type);
  qk_norm_rope_backward(dq, dk, dv, x, w, angles.cos, angles.sin, frozen, Tensor(), Tensor());
  EXPECT_TRUE(bit_equal(frozen, once[0]));
  EXPECT_EQ(
      relative_error(frozen.reshape({tokens, heads + keys, dim}).narrow(1, heads, heads + 1), dv),
      0.0);
}

TEST(Gradients, QkNorm) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t tokens = 5, queries = 2, keys = 1, dim = 8;
  const Angles angles(draw, tokens, dim, DType::f64);
  const QkNormWeights w{draw.tensor({dim}, DType::f64), draw.tensor({dim}, DType::f64), 0.1};
  const Tensor x = draw.tensor({tokens, queries + keys, dim}, DType::f64),
               c = draw.tensor({tokens, queries + keys, dim}, DType::f64);
  Tensor y = Tensor::empty(x.shape(), DType::f64);
  const auto objective = [&] {
    qk_norm_rope(x, queries, w, angles.cos, angles.sin, y);
    return dot(y, c);
  };
  Tensor dq = Tensor::empty({tokens, queries, dim}, DType::f64),
         dk = Tensor::empty({tokens, keys, dim}, DType::f64),
         d = Tensor::empty({tokens, (queries + 2 * keys) * dim}, DType::f64),
         d_q = Tensor::empty({dim}, DType::f64), d_k = Tensor::empty({dim}, DType::f64);
  copy_rows(c.narrow(1, 0, queries), dq);
  copy_rows(c.narrow(1, queries, queries + keys), dk);
  qk_norm_rope_backward(dq, dk, dk, x, w, angles.cos, angles.sin, d, {d_q, false}, {d_k, false});
  const Tensor heads = d.reshape({tokens, queries + 2 * keys, dim});
  EXPECT_LT(relative_error(heads.narrow(1, 0, queries + keys), central_differences(x, objective)),
            kGradientTolerance);
  EXPECT_LT(relative_error(d_q, central_differences(w.q, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(d_k, central_differences(w.k, objective)), kGradientTolerance);
}

}  // namespace
}  // namespace ballast
