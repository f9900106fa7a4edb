// The head in chunks of tokens against plain fp64 loops, and their gradients against central
// differences.
#include <gtest/gtest.h>

#include "kernels/model/lm_head.hpp"
#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

TEST(LmHead, JudgesChunkByChunk) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t tokens = 37, width = 6, vocabulary = 5;
  const auto make = [&](const Shape& shape) { return draw.tensor(shape, DType::f64); };
  LmHead head{make({width}), make({vocabulary, width}), {}, {}, 1e-6, 8};
  const Tensor residual = make({tokens, width}), branch = make({tokens, width}),
               targets = draw.integers({tokens}, -1, vocabulary - 1);
  Workspace workspace(host_device());
  Tensor loss = make({tokens}), correct = Tensor::zeros({tokens}, DType::u8);
  lm_head(head, residual, branch, targets, workspace, loss, correct);
  int right = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int64_t best = 0;
    double top = -1e30;
    for (std::int64_t j = 0; j < vocabulary; ++j) {
      double logit = 0;
      for (std::int64_t c = 0; c < width; ++c)
        logit += (element(residual, t * width + c) + element(branch, t * width + c)) *
                 element(head.norm, c) * element(head.weight, j * width + c);
      if (logit > top) top = logit, best = j;
    }
    ASSERT_EQ(correct.data<std::uint8_t>()[t],
              best == static_cast<std::int64_t>(element(targets, t)) ? 1 : 0)
        << "token " << t;
    right += best == static_cast<std::int64_t>(element(targets, t));
  }
  EXPECT_GT(right, 0);
}

TEST(Gradients, LmHead) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t t = 7, width = 6, vocabulary = 11;
  const auto f64 = [&](Shape shape) { return draw.tensor(shape, DType::f64); };
  const Tensor residual = f64({t, width}), branch = f64({t, width}),
               targets = from_list({1, 2, -1, 10, 0, 5, 5}), weights = f64({t});
  const Tensor d_norm = Tensor::zeros({width}, DType::f64),
               d_weight = Tensor::zeros({vocabulary, width}, DType::f64);
  LmHead head{f64({width}),
              f64({vocabulary, width}),
              ParameterGradient(d_norm),
              ParameterGradient(d_weight),
              1e-3,
              3};
  Workspace workspace(host_device());
  Tensor loss = f64({t}), again = f64({t}), d = f64({t, width});
  const auto objective = [&] {
    lm_head(head, residual, branch, targets, workspace, loss);
    return 1.3 * dot(loss, weights);
  };
  objective();
  const LossGradient gradient{1.3, weights, d};
  lm_head(head, residual, branch, targets, workspace, again, {}, &gradient);
  EXPECT_TRUE(bit_equal(again, loss));
  EXPECT_LT(relative_error(d, central_differences(residual, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(d, central_differences(branch, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(d_norm, central_differences(head.norm, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(d_weight, central_differences(head.weight, objective)),
            kGradientTolerance);
}

TEST(LmHead, LogitsAreNeverWhole) {
  const std::int64_t t = 4000, width = 4, vocabulary = 100, chunk = 50;
  const auto zeros = [](Shape shape) {
    return Tensor::zeros(std::move(shape), DType::f32, host_device(), MemoryCategory::data);
  };
  LmHead head{zeros({width}),
              zeros({vocabulary, width}),
              ParameterGradient(zeros({width})),
              ParameterGradient(zeros({vocabulary, width})),
              1e-6,
              chunk};
  Workspace workspace(host_device());
  Tensor residual = zeros({t, width}), loss = zeros({t}), d = zeros({t, width});
  const Tensor targets = Tensor::zeros({t}, DType::i32);
  reset_peak_memory();
  const std::int64_t before = memory_use().current_total;
  const LossGradient gradient{1, {}, d};
  lm_head(head, residual, residual, targets, workspace, loss, {}, &gradient);
  EXPECT_LE(memory_use().peak_total - before, chunk * (vocabulary + 2 * width + 2) * 4);
}

}  // namespace
}  // namespace ballast
