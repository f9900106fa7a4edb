// Every operation against plain fp64 loops, and its gradients against central differences.
#include <gtest/gtest.h>

#include <cstring>
#include <numbers>

#include "core/model/presets.hpp"
#include "kernels/model/lm_head.hpp"
#include "kernels/ops/cross_entropy.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/embedding.hpp"
#include "kernels/ops/linear.hpp"
#include "kernels/ops/rmsnorm.hpp"
#include "kernels/ops/rope.hpp"
#include "kernels/ops/swiglu.hpp"
#include "kernels/ops/vector_math.hpp"
#include "tests/kernels/model/reference_model.hpp"
#include "tests/kernels/ops/numeric.hpp"

namespace ballast {
namespace {

using namespace numeric;
constexpr double kGradientTolerance = 1e-8;

class Operations : public ::testing::TestWithParam<DType> {
 protected:
  Draw draw;
  ::testing::ScopedTrace trace{__FILE__, __LINE__, draw.trace()};
  DType type = GetParam();
  double tight = tolerance(GetParam(), 3e-6, 1e-13);
  // A tensor whose rows lie apart: columns [3, 3 + n) of a wider one.
  Tensor strided(std::int64_t rows, std::int64_t n) {
    return draw.tensor({rows, n + 7}, type).narrow(1, 3, 3 + n);
  }
};
INSTANTIATE_TEST_SUITE_P(Types, Operations, ::testing::Values(DType::f32, DType::f64),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(Operations, LinearIsThreeLoops) {
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

TEST_P(Operations, LinearLeavesWhatLiesBetweenRows) {
  Tensor wide = draw.tensor({4, 12}, type);
  const Tensor kept = wide.clone();
  Tensor y = wide.narrow(1, 3, 8);
  linear_forward(draw.tensor({4, 6}, type), draw.tensor({5, 6}, type), draw.tensor({5}, type), y);
  EXPECT_TRUE(relative_error(wide.narrow(1, 0, 3), kept.narrow(1, 0, 3)) == 0 &&
              relative_error(wide.narrow(1, 8, 12), kept.narrow(1, 8, 12)) == 0);
}

TEST(OperationErrors, ShapesThatDoNotFitAreRefused) {
  const auto make = [](Shape shape) { return Tensor::zeros(std::move(shape), DType::f32); };
  Tensor y = make({4, 5}), v = make({4}), w = make({5});
  EXPECT_THROW(linear_forward(make({4, 6}), make({5, 7}), {}, y), Error);
  EXPECT_THROW(linear_forward(make({4, 6}), make({5, 6}), make({4}), y), Error);
  EXPECT_THROW(rmsnorm_forward(make({4, 6}), make({6}), 1e-6, y, v), Error);
  EXPECT_THROW(swiglu_forward(make({4, 9}), y), Error);
  EXPECT_THROW(rope_apply(make({4, 1, 5}), make({4, 2}), make({4, 2}), false, y), Error);
  EXPECT_THROW(cross_entropy_forward(make({3, 7}), Tensor::zeros({4}, DType::i32), v, v), Error);
  Tensor other = Tensor::zeros({4, 5}, DType::f64);
  EXPECT_THROW(add(y, other, y), Error);  // dtypes differ
  EXPECT_THROW(linear_forward(Tensor::zeros({4, 6}, DType::bf16), make({5, 6}), {}, y), Error);
}

TEST(OperationErrors, DeviceTensorsNeedADeviceBuild) {
#ifndef BALLAST_HAVE_CUDA
  float pretend[4] = {};
  Tensor device = Tensor::wrap(pretend, {2, 2}, DType::f32, Space::cuda);
  try {
    add(device, device, device);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("without CUDA"), std::string::npos);
  }
#endif
}

TEST_P(Operations, RmsNormFollowsItsFormula) {
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
  rmsnorm_input_gradient(c, x, kept, w, false, dx);
  rmsnorm_weight_gradient(c, x, kept, dw);
  EXPECT_LT(relative_error(dx, central_differences(x, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(dw, central_differences(w, objective)), kGradientTolerance);
  rmsnorm_input_gradient(c, x, kept, w, true, more);
  rmsnorm_input_gradient(c, x, kept, w, true, more);
  std::vector<double> twice = elements(dx);
  for (double& g : twice) g *= 2;
  EXPECT_LT(relative_error(more, twice), 1e-13);
}

TEST_P(Operations, RmsNormGradientsAgreeWithDouble) {
  const Tensor x = draw.tensor({9, 70}, type), w = draw.tensor({70}, type),
               dy = draw.tensor({9, 70}, type);
  const auto gradients = [&](DType t) {
    const Tensor a = converted(x, t), b = converted(w, t), g = converted(dy, t);
    Tensor y = Tensor::empty({9, 70}, t), rstd = Tensor::empty({9}, t),
           dx = Tensor::empty({9, 70}, t), dw = Tensor::zeros({70}, t);
    rmsnorm_forward(a, b, 1e-6, y, rstd);
    rmsnorm_input_gradient(g, a, rstd, b, false, dx);
    rmsnorm_weight_gradient(g, a, rstd, dw);
    return std::pair{elements(dx), elements(dw)};
  };
  const auto [dx, dw] = gradients(type);
  const auto [dx_ref, dw_ref] = gradients(DType::f64);
  EXPECT_LT(relative_error(dx, dx_ref), 3e-6);
  EXPECT_LT(relative_error(dw, dw_ref), 3e-6);
}

ModelShape rope_shape(int kind) {
  ModelShape s = model_preset(kind == 2 ? "llama3.1-8b" : "qwen2.5-0.5b");
  if (kind == 1) s.yarn_factor = 4;
  return s;
}

TEST(Rope, FrequenciesFollowTheirRules) {
  for (int kind : {0, 1, 2}) {
    const ModelShape s = rope_shape(kind);
    const RopeFrequencies rope = rope_frequencies(s);
    ASSERT_EQ(static_cast<std::int64_t>(rope.frequency.size()), s.head_dim / 2);
    for (std::int64_t i = 0; i < s.head_dim / 2; ++i)
      EXPECT_NEAR(rope.frequency[static_cast<std::size_t>(i)] / reference::rope_frequency(s, i),
                  1.0, 1e-12)
          << kind << " " << i;
    EXPECT_DOUBLE_EQ(rope.amplitude, reference::rope_amplitude(s));
    // Fast pairs are never scaled, the slowest always by the whole factor.
    const double factor = kind == 1 ? s.yarn_factor : kind == 2 ? s.llama3_factor : 1;
    EXPECT_DOUBLE_EQ(rope.frequency.front(), 1.0);
    EXPECT_NEAR(rope.frequency.back() * factor,
                std::pow(s.rope_theta, 2.0 / static_cast<double>(s.head_dim) - 1.0), 1e-12);
  }
}

TEST_P(Operations, RopeTurnsPairsAndItsTransposeTurnsBack) {
  const std::int64_t t = 11, heads = 3;
  for (int kind : {0, 1}) {
    const ModelShape s = rope_shape(kind);
    const RopeFrequencies rope = rope_frequencies(s);
    const std::int64_t d = s.head_dim, half = d / 2;
    const Tensor positions = draw.integers({t}, 0, 524288);
    Tensor cos = Tensor::empty({t, half}, type), sin = Tensor::empty({t, half}, type);
    rope_table(positions, rope, cos, sin);
    const Tensor wide = draw.tensor({t, heads + 2, d}, type), x = wide.narrow(1, 1, 1 + heads);
    Tensor y = Tensor::empty({t, heads, d}, type), back = Tensor::empty({t, heads, d}, type);
    rope_apply(x, cos, sin, false, y);
    std::vector<double> expected(static_cast<std::size_t>(t * heads * d)), scaled = elements(x);
    for (std::int64_t i = 0; i < t; ++i)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t j = 0; j < half; ++j) {
          const std::int64_t at = (i * heads + h) * d + j;
          const double angle = element(positions, i) * reference::rope_frequency(s, j),
                       a = element(x, at), b = element(x, at + half);
          expected[static_cast<std::size_t>(at)] =
              rope.amplitude * (a * std::cos(angle) - b * std::sin(angle));
          expected[static_cast<std::size_t>(at + half)] =
              rope.amplitude * (b * std::cos(angle) + a * std::sin(angle));
        }
    EXPECT_LT(relative_error(y, expected), tolerance(type, 1e-6, 1e-10));
    rope_apply(y, cos, sin, true, back);
    for (double& value : scaled) value *= rope.amplitude * rope.amplitude;
    EXPECT_LT(relative_error(back, scaled), tight);
    // In place on a slice gives the same and leaves the neighbours alone.
    Tensor slice = wide.clone();
    Tensor inner = slice.narrow(1, 1, 1 + heads);
    rope_apply(inner, cos, sin, false, inner);
    EXPECT_EQ(relative_error(inner, y), 0.0);
    EXPECT_EQ(relative_error(slice.narrow(1, 0, 1), wide.narrow(1, 0, 1)), 0.0);
  }
}

TEST(Gradients, Rope) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const RopeFrequencies rope = rope_frequencies(rope_shape(1));
  const Tensor x = draw.tensor({3, 2, 64}, DType::f64), c = draw.tensor({3, 2, 64}, DType::f64);
  Tensor cos = Tensor::empty({3, 32}, DType::f64), sin = Tensor::empty({3, 32}, DType::f64),
         y = Tensor::empty({3, 2, 64}, DType::f64), dx = y.clone();
  rope_table(draw.integers({3}, 0, 1000), rope, cos, sin);
  rope_apply(c, cos, sin, true, dx);
  EXPECT_LT(
      relative_error(
          dx, central_differences(x, [&] { return rope_apply(x, cos, sin, false, y), dot(y, c); })),
      kGradientTolerance);
}

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

TEST_P(Operations, SwiGluFollowsItsFormula) {
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
  Tensor in_place = x.clone();
  swiglu_backward(in_place, c, in_place);
  EXPECT_TRUE(bit_equal(in_place, dx));
  const Tensor single = converted(x, DType::f32);
  Tensor d_single = Tensor::empty({4, 22}, DType::f32);
  swiglu_backward(single, converted(c, DType::f32), d_single);
  EXPECT_LT(relative_error(d_single, dx), 2e-6);
}

TEST_P(Operations, EmbeddingLooksUpAndAddsBack) {
  const std::int64_t t = 300, vocabulary = 7, width = 70;
  const Tensor tokens = draw.integers({t}, 0, vocabulary - 1),
               w = draw.tensor({vocabulary, width}, type), dy = draw.tensor({t, width}, type);
  Tensor y = Tensor::empty({t, width}, type), dw = draw.tensor({vocabulary, width}, type);
  std::vector<double> expected = elements(dw);
  embedding_forward(tokens, w, y);
  embedding_weight_gradient(tokens, dy, dw);
  for (std::int64_t i = 0; i < t; ++i)
    for (std::int64_t j = 0; j < width; ++j) {
      const auto id = static_cast<std::int64_t>(element(tokens, i));
      ASSERT_EQ(element(y, i * width + j), element(w, id * width + j));
      expected[static_cast<std::size_t>(id * width + j)] += element(dy, i * width + j);
    }
  EXPECT_LT(relative_error(dw, expected),
            tolerance(type, 1e-7, 1e-13));  // one rounding: sums are fp64
  for (const std::int32_t bad : {-1, 7}) {
    const Tensor wrong = from_list({0, bad});
    Tensor two = Tensor::empty({2, width}, type);
    EXPECT_THROW(embedding_forward(wrong, w, two), Error);
    EXPECT_THROW(embedding_weight_gradient(wrong, two, dw), Error);
  }
}

TEST_P(Operations, CrossEntropyFollowsItsFormula) {
  for (const std::int64_t vocabulary : {1, 9, 300, 5000}) {
    const std::int64_t n = 6;
    const Tensor logits = draw.tensor({n, vocabulary}, type, 5.0);
    Tensor targets = draw.integers({n}, 0, vocabulary - 1), loss = Tensor::empty({n}, type),
           lse = Tensor::empty({n}, type);
    targets.data<std::int32_t>()[2] = -1;
    const Tensor weights = draw.tensor({n}, type);
    cross_entropy_forward(logits, targets, loss, lse);
    Tensor d = logits.clone();
    cross_entropy_backward(targets, lse, 0.3, weights, d);
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

TEST_P(Operations, CrossEntropyCorrectIsTheArgmax) {
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

TEST(LmHead, JudgesChunkByChunk) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t tokens = 37, width = 6, vocabulary = 5;
  const auto make = [&](const Shape& shape) { return draw.tensor(shape, DType::f64); };
  LmHead head{make({width}), {}, make({vocabulary, width}), {}, 1e-6, 8};
  const Tensor residual = make({tokens, width}), branch = make({tokens, width}),
               targets = draw.integers({tokens}, -1, vocabulary - 1);
  Workspace workspace(host_device());
  Tensor hidden = make({tokens, width}), rstd = make({tokens}), lse = make({tokens}),
         loss = make({tokens}), correct = Tensor::zeros({tokens}, DType::u8);
  lm_head_forward(head, residual, branch, targets, workspace, hidden, rstd, lse, loss, correct);
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
  cross_entropy_backward(targets, lse, 0.7, weights, d);
  EXPECT_LT(relative_error(d, central_differences(logits, objective)), kGradientTolerance);
}

TEST(Gradients, LmHead) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t t = 7, width = 6, vocabulary = 11;
  const auto f64 = [&](Shape shape) { return draw.tensor(shape, DType::f64); };
  const Tensor residual = f64({t, width}), branch = f64({t, width}),
               targets = from_list({1, 2, -1, 10, 0, 5, 5}), weights = f64({t});
  LmHead head{f64({width}),
              Tensor::zeros({width}, DType::f64),
              f64({vocabulary, width}),
              Tensor::zeros({vocabulary, width}, DType::f64),
              1e-3,
              3};
  Workspace workspace(host_device());
  Tensor hidden = f64({t, width}), rstd = f64({t}), lse = f64({t}), loss = f64({t}),
         d = f64({t, width});
  const auto objective = [&] {
    lm_head_forward(head, residual, branch, targets, workspace, hidden, rstd, lse, loss);
    return 1.3 * dot(loss, weights);
  };
  objective();
  lm_head_backward(head, hidden, rstd, lse, targets, 1.3, weights, workspace, d);
  EXPECT_LT(relative_error(d, central_differences(residual, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(d, central_differences(branch, objective)), kGradientTolerance);
  EXPECT_LT(relative_error(head.norm_gradient, central_differences(head.norm, objective)),
            kGradientTolerance);
  EXPECT_LT(relative_error(head.weight_gradient, central_differences(head.weight, objective)),
            kGradientTolerance);
}

TEST(LmHead, LogitsAreNeverWhole) {
  const std::int64_t t = 4000, width = 4, vocabulary = 100, chunk = 50;
  const auto zeros = [](Shape shape) {
    return Tensor::zeros(std::move(shape), DType::f32, host_device(), MemoryCategory::data);
  };
  LmHead head{
      zeros({width}), zeros({width}), zeros({vocabulary, width}), zeros({vocabulary, width}),
      1e-6,           chunk};
  Workspace workspace(host_device());
  Tensor residual = zeros({t, width}), hidden = zeros({t, width}), rstd = zeros({t}),
         lse = zeros({t}), loss = zeros({t}), d = zeros({t, width});
  const Tensor targets = Tensor::zeros({t}, DType::i32);
  reset_peak_memory();
  const std::int64_t before = memory_use().current_total;
  lm_head_forward(head, residual, residual, targets, workspace, hidden, rstd, lse, loss);
  lm_head_backward(head, hidden, rstd, lse, targets, 1, {}, workspace, d);
  EXPECT_LE(memory_use().peak_total - before, chunk * (vocabulary + 2 * width) * 4);
}

TEST_P(Operations, AddAndCopyRows) {
  const Tensor a = strided(5, 9), b = strided(5, 9);
  Tensor sum = strided(5, 9), copy = strided(5, 9),
         other = Tensor::empty({5, 9}, type == DType::f64 ? DType::f32 : DType::f64);
  add(a, b, sum);
  copy_rows(a, copy);
  copy_rows(a, other);
  for (std::int64_t i = 0; i < 45; ++i) {
    EXPECT_NEAR(element(sum, i), element(a, i) + element(b, i), 1e-6);
    EXPECT_EQ(element(copy, i), element(a, i));
    EXPECT_NEAR(element(other, i), element(a, i), 1e-6);
  }
}

}  // namespace
}  // namespace ballast
