// Rotary embedding against plain fp64 loops, and gradients against central differences.
#include <gtest/gtest.h>

#include "core/model/presets.hpp"
#include "kernels/ops/elementwise.hpp"
#include "kernels/ops/rope.hpp"
#include "tests/kernels/model/reference_model.hpp"
#include "tests/kernels/ops/operation_test.hpp"

namespace ballast {
namespace {

using namespace numeric;

ModelShape rope_shape(int kind) {
  ModelShape s = model_preset(kind == 2 ? "llama3.1-8b" : "qwen2.5-0.5b");
  if (kind == 1) s.yarn_factor = 4;
  return s;
}

class RopeOperation : public OperationTest {};
INSTANTIATE_TEST_SUITE_P(Types, RopeOperation, both_types(), type_name_of);

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

TEST_P(RopeOperation, RopeTurnsPairsAndItsTransposeTurnsBack) {
  const std::int64_t t = 11, heads = 3;
  for (int kind : {0, 1}) {
    const ModelShape s = rope_shape(kind);
    const RopeFrequencies rope = rope_frequencies(s);
    const std::int64_t d = s.head_dim, half = d / 2;
    const Tensor positions = draw.integers({t}, 0, 524288);
    Tensor cos = Tensor::empty({t, half}, type), sin = Tensor::empty({t, half}, type);
    rope_table(positions, rope, cos, sin);
    const Tensor wide = draw.tensor({t, heads + 2, d}, type), x = wide.narrow(1, 1, 1 + heads);
    Tensor y = Tensor::empty({t, heads, d}, type),
           d_qkv = Tensor::empty({t, (heads + 2) * d}, type);
    copy_rows(x, y);
    rope_apply(y, heads, {}, cos, sin);
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
    // q and k are turned back, v is kept.
    rope_backward(y, y.narrow(1, 0, 1), x.narrow(1, 2, 3), cos, sin, d_qkv);
    const Tensor back = d_qkv.reshape({t, heads + 2, d});
    for (double& value : scaled) value *= rope.amplitude * rope.amplitude;
    EXPECT_LT(relative_error(back.narrow(1, 0, heads), scaled), tight);
    EXPECT_EQ(relative_error(back.narrow(1, heads, heads + 1), back.narrow(1, 0, 1)), 0.0);
    EXPECT_EQ(relative_error(back.narrow(1, heads + 1, heads + 2), x.narrow(1, 2, 3)), 0.0);
    // On a slice it gives the same and leaves the neighbours alone.
    Tensor slice = wide.clone();
    Tensor inner = slice.narrow(1, 1, 1 + heads);
    rope_apply(inner, heads, {}, cos, sin);
    EXPECT_EQ(relative_error(inner, y), 0.0);
    EXPECT_EQ(relative_error(slice.narrow(1, 0, 1), wide.narrow(1, 0, 1)), 0.0);
    // A bias comes first, also to heads that are not turned.
    const Tensor bias = draw.tensor({heads * d}, type);
    Tensor before = Tensor::empty({t, heads, d}, type);
    copy_rows(x, before);
    for (std::int64_t i = 0; i < t; ++i) {
      Tensor row = before.rows(i, i + 1).reshape({heads * d});
      add(row, bias, row);
    }
    Tensor with_bias = Tensor::empty({t, heads, d}, type);
    copy_rows(x, with_bias);
    rope_apply(with_bias, 2, bias, cos, sin);
    EXPECT_EQ(relative_error(with_bias.narrow(1, 2, heads), before.narrow(1, 2, heads)), 0.0);
    rope_apply(before, heads, {}, cos, sin);
    EXPECT_EQ(relative_error(with_bias.narrow(1, 0, 2), before.narrow(1, 0, 2)), 0.0);
  }
}

TEST(Gradients, Rope) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const RopeFrequencies rope = rope_frequencies(rope_shape(1));
  const Tensor x = draw.tensor({3, 2, 64}, DType::f64), c = draw.tensor({3, 2, 64}, DType::f64);
  Tensor cos = Tensor::empty({3, 32}, DType::f64), sin = Tensor::empty({3, 32}, DType::f64),
         y = Tensor::empty({3, 2, 64}, DType::f64), d = Tensor::empty({3, 4 * 64}, DType::f64);
  rope_table(draw.integers({3}, 0, 1000), rope, cos, sin);
  const Tensor first = c.narrow(1, 0, 1);
  rope_backward(c, first, first, cos, sin, d);
  const auto dx = central_differences(x, [&] {
    copy_rows(x, y);
    rope_apply(y, 2, {}, cos, sin);
    return dot(y, c);
  });
  EXPECT_LT(relative_error(d.reshape({3, 4, 64}).narrow(1, 0, 2), dx), kGradientTolerance);
}

}  // namespace
}  // namespace ballast
