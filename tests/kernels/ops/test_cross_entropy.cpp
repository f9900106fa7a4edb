// Cross-entropy against plain fp64 loops, and gradients against central differences.
#include <gtest/gtest.h>

#include "kernels/ops/cross_entropy.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

class CrossEntropyOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, CrossEntropyOperation, both_types(), type_name_of);

TEST_P(CrossEntropyOperation, CrossEntropyFollowsItsFormula) {
  for (const std::int64_t vocabulary : {1, 9, 300, 5000}) {
    const std::int64_t n = 6;
    const Tensor logits = draw.tensor({n, vocabulary}, type, 5.0);
    Tensor targets = draw.integers({n}, 0, vocabulary - 1), loss = Tensor::empty({n}, type),
           lse = Tensor::empty({n}, type);
    targets.data<std::int32_t>()[2] = -1;
    const Tensor weights = draw.tensor({n}, type);
    cross_entropy_forward(logits, targets, loss, lse);
    Tensor d = logits.clone();
    Tensor loss_again = Tensor::empty({n}, type), lse_again = Tensor::empty({n}, type);
    cross_entropy_with_gradient(targets, 0.3, weights, d, loss_again, lse_again);
    EXPECT_TRUE(bit_equal(loss_again, loss) && bit_equal(lse_again, lse));
    std::vector<double> expected, gradient;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto target = static_cast<std::int64_t>(element(targets, i));
      double top = -1e30, sum = 0;
      for (std::int64_t j = 0; j < vocabulary; ++j)
        top = std::max(top, element(logits, i * vocabulary + j));
      for (std::int64_t j = 0; j < vocabulary; ++j)
        sum += std::exp(element(logits, i * vocabulary + j) - top);
      expected.push_back(
          target < 0 ? 0 : top + std::log(sum) - element(logits, i * vocabulary + target));
      for (std::int64_t j = 0; j < vocabulary; ++j)
        gradient.push_back(
            target < 0
                ? 0
                : 0.3 * element(weights, i) *
                      (std::exp(element(logits, i * vocabulary + j) - top) / sum - (j == target)));
    }
    EXPECT_LT(relative_error(loss, expected), tight);
    EXPECT_LT(relative_error(d, gradient), tolerance(type, 1e-5, 1e-12));
    double sum = 0;
    for (double value : elements(loss)) sum += value;
    EXPECT_NEAR(sum_losses(loss), sum, 1e-12 * (1 + sum));
  }
  // Logits far apart neither overflow nor turn into NaN.
  Tensor logits = Tensor::zeros({2, 3}, type), loss = Tensor::empty({2}, type),
         lse = Tensor::empty({2}, type);
  dispatch_float(type, [&](auto t) {
    auto* p = logits.data<decltype(t)>();
    p[0] = 1e4, p[1] = -1e4, p[3] = -1e4, p[4] = -1e4, p[5] = -1e4;
  });
  cross_entropy_forward(logits, from_list({0, 1}), loss, lse);
  EXPECT_NEAR(element(loss, 0), 0.0, 1e-6);
  EXPECT_NEAR(element(loss, 1), std::log(3.0), 1e-2);
  EXPECT_THROW(cross_entropy_forward(logits, from_list({0, 3}), loss, lse), Error);
  EXPECT_THROW(cross_entropy_forward(logits, from_list({0, -2}), loss, lse), Error);
}

TEST_P(CrossEntropyOperation, CrossEntropyCorrectIsTheArgmax) {
  int right = 0, ties = 0;
  for (const std::int64_t vocabulary : {1, 2, 5, 300}) {
    const std::int64_t n = 64;
    const Tensor logits = Tensor::empty({n, vocabulary}, type),
                 targets = draw.integers({n}, -1, vocabulary - 1);
    Tensor correct = Tensor::empty({n}, DType::u8);
    dispatch_float(type, [&](auto t) {  // few distinct values, so that ties happen
      for (std::int64_t i = 0; i < logits.numel(); ++i)
        logits.data<decltype(t)>()[i] = static_cast<decltype(t)>(draw.integer(-3, 3));
    });
    cross_entropy_correct(logits, targets, correct);
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t best = 0;
      for (std::int64_t j = 1; j < vocabulary; ++j)
        if (element(logits, i * vocabulary + j) > element(logits, i * vocabulary + best)) best = j;
      const auto target = static_cast<std::int64_t>(element(targets, i));
      ASSERT_EQ(correct.data<std::uint8_t>()[i], target == best ? 1 : 0);
      right += target == best;
      ties += target >= 0 && target != best &&
              element(logits, i * vocabulary + target) == element(logits, i * vocabulary + best);
    }
  }
  EXPECT_GT(right, 0);
  EXPECT_GT(ties, 0);
  Tensor logits = Tensor::zeros({2, 3}, type), correct = Tensor::empty({2}, DType::u8);
  dispatch_float(
      type, [&](auto t) { logits.data<decltype(t)>()[2] = logits.data<decltype(t)>()[3] = NAN; });
  cross_entropy_correct(logits, from_list({0, 0}), correct);
  EXPECT_EQ(correct.data<std::uint8_t>()[0], 0);  // another logit is NaN
  EXPECT_EQ(correct.data<std::uint8_t>()[1], 0);  // the target's own is
  EXPECT_THROW(cross_entropy_correct(logits, from_list({0, 3}), correct), Error);
  EXPECT_THROW(cross_entropy_correct(logits, from_list({0}), correct), Error);
}

TEST(Gradients, CrossEntropy) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const Tensor logits = draw.tensor({4, 13}, DType::f64), targets = from_list({3, -1, 0, 12}),
               weights = draw.tensor({4}, DType::f64);
  Tensor loss = Tensor::empty({4}, DType::f64), lse = Tensor::empty({4}, DType::f64);
  const auto objective = [&] {
    return cross_entropy_forward(logits, targets, loss, lse), 0.7 * dot(loss, weights);
  };
  objective();
  Tensor d = logits.clone();
  cross_entropy_with_gradient(targets, 0.7, weights, d, loss, lse);
  EXPECT_LT(relative_error(d, central_differences(logits, objective)), kGradientTolerance);
}

}  // namespace
}  // namespace ballast
