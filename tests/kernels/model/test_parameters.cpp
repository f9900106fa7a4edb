// Flat parameter buffers, initial values, and the optimizer's arithmetic.
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/model/parameters.hpp"
#include "kernels/ops/adamw.hpp"
#include "tests/kernels/ops/numeric.hpp"

namespace ballast {
namespace {

using namespace numeric;

ModelShape biased_shape() {
  ModelShape s;
  s.layers = 4;
  s.hidden = 32;
  s.query_heads = 4;
  s.kv_heads = 2;
  s.head_dim = 8;
  s.intermediate = 48;
  s.vocabulary = 100;
  s.qkv_bias = true;
  return s;
}

TEST(Parameters, LieBackToBackAndJoin) {
  const ModelShape shape = biased_shape();
  Parameters p(parameter_table(shape), DType::f32, host_device(), 1000);
  EXPECT_EQ(p.numel(), shape.parameters());
  EXPECT_EQ(p.values().numel() % 1000, 0);
  EXPECT_GE(p.values().numel(), p.numel());
  EXPECT_LT(p.values().numel(), p.numel() + 1000);
  EXPECT_EQ(p.gradients().numel(), p.values().numel());
  std::int64_t offset = 0;
  for (const Parameter& row : p.table()) {
    EXPECT_EQ(p.offset(row.name), offset);
    EXPECT_EQ(p.value(row.name).raw(), p.values().data<float>() + offset);
    EXPECT_EQ(p.gradient(row.name).shape(), row.shape);
    offset += row.numel();
  }
  const Tensor qkv = p.joined_value("model.layers.1.self_attn.q_proj.weight", 3);
  EXPECT_EQ(qkv.shape(), (Shape{64, 32}));
  EXPECT_EQ(qkv.rows(32, 48).raw(), p.value("model.layers.1.self_attn.k_proj.weight").raw());
  EXPECT_EQ(qkv.rows(48, 64).raw(), p.value("model.layers.1.self_attn.v_proj.weight").raw());
  EXPECT_EQ(p.joined_gradient("model.layers.1.self_attn.q_proj.bias", 3).shape(), (Shape{64}));
  EXPECT_THROW(p.value("model.layers.9.mlp.up_proj.weight"), Error);
  EXPECT_THROW(p.joined_value("model.layers.0.self_attn.v_proj.weight", 2), Error);
  EXPECT_THROW(p.joined_value("model.norm.weight", 5), Error);
  EXPECT_THROW(Parameters(parameter_table(shape), DType::bf16, host_device()), Error);
  auto twice = parameter_table(shape);
  twice.push_back(twice.front());
  EXPECT_THROW(Parameters(twice, DType::f32, host_device()), Error);
  EXPECT_TRUE(p.contains("lm_head.weight"));
  EXPECT_FALSE(p.contains("lm_head.bias"));
}

TEST(Parameters, InitialValuesDependOnSeedAndNameAlone) {
  const ModelShape shape = biased_shape();
  Parameters whole(parameter_table(shape), DType::f32, host_device()),
      other(parameter_table(shape), DType::f32, host_device());
  whole.initialise(7);
  other.initialise(8);
  // The last of three stages, in double, padded: same numbers up to rounding.
  auto rows = parameter_table(shape, {0, 1, 3});
  std::erase_if(rows, [](const Parameter& p) { return p.stage != 2; });
  Parameters part(rows, DType::f64, host_device(), 64);
  part.initialise(7);
  for (const Parameter& p : part.table())
    EXPECT_LT(relative_error(whole.value(p.name), part.value(p.name)), 1e-7) << p.name;
  EXPECT_GT(relative_error(whole.value("lm_head.weight"), other.value("lm_head.weight")), 0.5);
  EXPECT_GT(relative_error(whole.value("model.layers.0.mlp.up_proj.weight"),
                           whole.value("model.layers.1.mlp.up_proj.weight")),
            0.5);
  for (std::int64_t i = part.numel(); i < part.values().numel(); ++i)
    EXPECT_EQ(element(part.values(), i), 0.0);
}

TEST(Parameters, InitialValuesHaveTheirDistribution) {
  Parameters p(parameter_table(biased_shape()), DType::f32, host_device());
  p.initialise(123);
  for (const Parameter& row : p.table()) {
    const std::vector<double> values = elements(p.value(row.name));
    if (row.initialiser != Initialiser::normal) {
      for (double v : values)
        EXPECT_EQ(v, row.initialiser == Initialiser::ones ? 1.0 : 0.0) << row.name;
      continue;
    }
    const double n = static_cast<double>(values.size());
    double mean = 0, square = 0;
    for (double v : values) {
      mean += v / n;
      square += v * v / n;
      EXPECT_LT(std::abs(v), 7 * row.initial_std);
    }
    EXPECT_LT(std::abs(mean), 5 * row.initial_std / std::sqrt(n)) << row.name;
    EXPECT_NEAR(std::sqrt(square) / row.initial_std, 1.0, 5 / std::sqrt(2 * n)) << row.name;
  }
}

TEST(Parameters, FirstContributionOverwrites) {
  ModelShape shape = biased_shape();
  shape.tied_embedding = true;
  Parameters p(parameter_table(shape), DType::f64, host_device(), 4);
  const ParameterGradient qkv = p.gradient_of("model.layers.1.self_attn.q_proj.weight", 3),
                          head = p.gradient_of("model.embed_tokens.weight"),
                          embedding = p.gradient_of("model.embed_tokens.weight");
  EXPECT_TRUE(qkv.next().accumulate) << "a buffer that is all zeros";
  EXPECT_FALSE(ParameterGradient().next().defined());
  for (int step = 0; step < 2; ++step) {
    for (std::int64_t i = 0; i < p.trainable_numel(); ++i) p.gradients().data<double>()[i] = NAN;
    p.clear_gradients();
    EXPECT_FALSE(qkv.next().accumulate);
    EXPECT_TRUE(qkv.next().accumulate);
    EXPECT_FALSE(head.next().accumulate);
    EXPECT_TRUE(embedding.next().accumulate) << "the same parameter";
    p.settle_gradients();
    for (const Parameter& row : p.table()) {
      const bool written = row.name == "model.embed_tokens.weight" ||
                           (row.name.starts_with("model.layers.1.self_attn.") &&
                            !row.name.ends_with("o_proj.weight") && row.name.ends_with("weight"));
      for (double g : elements(p.gradient(row.name)))
        ASSERT_EQ(std::isnan(g), written) << row.name << " " << g;
    }
  }
  p.clear_gradients();
  p.gradient_of("model.layers.0.self_attn.k_proj.weight").next();
  EXPECT_THROW(p.gradient_of("model.layers.0.self_attn.q_proj.weight", 3).next(), Error);
}

class Optimizer : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, Optimizer, ::testing::Values(DType::f32, DType::f64),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(Optimizer, AdamWFollowsItsAlgorithm) {
  const DType type = GetParam();
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t n = 10007;
  AdamWOptions options;
  options.weight_decay = 0.3;
  AdamWState state{draw.tensor({n}, type), Tensor::zeros({n}, type), Tensor::zeros({n}, type),
                   Tensor::empty({40}, DType::i64)};
  std::vector<bool> decays(static_cast<std::size_t>(n));
  for (std::int64_t i = 0, at = 0; i < 40; ++i) {
    const std::int64_t next = at + draw.integer(1, 200);
    state.decay.data<std::int64_t>()[i] = at = next;
    if (i % 2 != 0)
      for (std::int64_t j = state.decay.data<std::int64_t>()[i - 1]; j < at; ++j)
        decays[static_cast<std::size_t>(j)] = true;
  }
  Tensor values = Tensor::empty({n}, type);
  std::vector<double> w = elements(state.master), m(w.size(), 0.0), v(w.size(), 0.0);
  for (int step = 1; step <= 5; ++step) {
    const Tensor gradient = draw.tensor({n}, type, 0.1);
    const double rate = 0.01 * step, scale = 0.8;
    adamw_step(state, gradient, scale, rate, step, options, values);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = scale * element(gradient, static_cast<std::int64_t>(i));
      m[i] = 0.9 * m[i] + (1 - 0.9) * g;
      v[i] = 0.95 * v[i] + (1 - 0.95) * g * g;
      if (decays[i]) w[i] -= rate * 0.3 * w[i];
      w[i] -= rate * (m[i] / (1 - std::pow(0.9, step))) /
              (std::sqrt(v[i] / (1 - std::pow(0.95, step))) + 1e-8);
    }
    EXPECT_LT(relative_error(values, w), tolerance(type, 1e-6, 1e-13)) << step;
    EXPECT_TRUE(bit_equal(values, state.master));
  }
  EXPECT_LT(relative_error(state.moment1, m), tolerance(type, 1e-6, 1e-13));
  EXPECT_LT(relative_error(state.moment2, v), tolerance(type, 1e-6, 1e-13));
}

TEST_P(Optimizer, ShardsGiveTheBitsOfTheWhole) {
  const DType type = GetParam();
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t n = 9000, cut = draw.integer(1, n - 1);
  const auto state = [&](const Tensor& master) {
    return AdamWState{master.clone(), Tensor::zeros({n}, type), Tensor::zeros({n}, type),
                      Tensor::zeros({0}, DType::i64)};
  };
  const Tensor master = draw.tensor({n}, type), gradient = draw.tensor({n}, type);
  AdamWState whole = state(master), split = state(master);
  Tensor a = Tensor::empty({n}, type), b = Tensor::empty({n}, type);
  adamw_step(whole, gradient, 1, 0.1, 1, {}, a);
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, {cut, n}}) {
    AdamWState part{split.master.rows(begin, end), split.moment1.rows(begin, end),
                    split.moment2.rows(begin, end), split.decay};
    Tensor out = b.rows(begin, end);
    adamw_step(part, gradient.rows(begin, end), 1, 0.1, 1, {}, out);
  }
  EXPECT_TRUE(bit_equal(a, b));
  AdamWState none{master.rows(0, 0), master.rows(0, 0), master.rows(0, 0), whole.decay};
  Tensor empty = a.rows(0, 0);
  EXPECT_NO_THROW(adamw_step(none, gradient.rows(0, 0), 1, 0.1, 1, {}, empty));
  EXPECT_THROW(adamw_step(whole, gradient, 1, 0.1, 0, {}, a), Error);
  EXPECT_THROW(adamw_step(whole, gradient.rows(1, n), 1, 0.1, 1, {}, a), Error);
}

TEST_P(Optimizer, Bf16MomentsAreRoundedByElementAndStep) {
  const DType type = GetParam();
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t n = 9001, cut = draw.integer(1, n - 1);
  const Tensor master = draw.tensor({n}, type), decay = Tensor::zeros({0}, DType::i64);
  const auto state = [&](DType moments) {
    return AdamWState{master.clone(), Tensor::zeros({n}, moments), Tensor::zeros({n}, moments),
                      decay};
  };
  AdamWState full = state(type), whole = state(DType::bf16), split = state(DType::bf16);
  Tensor a = Tensor::empty({n}, type), b = a.clone(), c = a.clone();
  for (int step = 1; step <= 3; ++step) {
    const Tensor gradient = draw.tensor({n}, type);
    adamw_step(full, gradient, 1, 0.1, step, {}, a);
    adamw_step(whole, gradient, 1, 0.1, step, {}, b);
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, {cut, n}}) {
      AdamWState part{split.master.rows(begin, end), split.moment1.rows(begin, end),
                      split.moment2.rows(begin, end), decay, begin};
      Tensor out = c.rows(begin, end);
      adamw_step(part, gradient.rows(begin, end), 1, 0.1, step, {}, out);
    }
    EXPECT_TRUE(bit_equal(b, c)) << "cut at " << cut << ", step " << step;
    EXPECT_TRUE(bit_equal(whole.moment2, split.moment2));
    // The update has moments as they were before they are rounded.
    EXPECT_EQ(bit_equal(a, b), step == 1) << step;
    EXPECT_LT(relative_error(b, elements(a)), 5e-3) << step;
  }
  for (const auto& [found, exact] :
       {std::pair{whole.moment1, full.moment1}, {whole.moment2, full.moment2}}) {
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const double e = element(found, i) - element(exact, i);
      sum += e, squares += e * e;
    }
    EXPECT_GT(squares, 0);
    EXPECT_LT(std::fabs(sum), 6 * std::sqrt(squares)) << "no side is preferred";
    EXPECT_LT(relative_error(found, elements(exact)), 1e-2);
  }
  full.moment1 = whole.moment1;
  EXPECT_THROW(adamw_step(full, master, 1, 0.1, 1, {}, a), Error) << "one moment in bf16";
}

TEST_P(Optimizer, Bf16MomentsDoNotStandStill) {
  const DType type = GetParam();
  const std::int64_t n = 4096;
  AdamWOptions options;
  options.beta2 = 0.999;  // a step changes less than half a unit of bf16's last place
  AdamWState state{Tensor::zeros({n}, type), Tensor::zeros({n}, DType::bf16),
                   Tensor::zeros({n}, DType::bf16), Tensor::zeros({0}, DType::i64)};
  Tensor gradient = Tensor::zeros({n}, type), values = Tensor::zeros({n}, type);
  double expected = 0;
  for (int step = 1; step <= 2000; ++step) {
    const double g = step <= 1000 ? 2.0 : 0.5;
    dispatch_float(type, [&](auto t) {
      std::fill_n(gradient.data<decltype(t)>(), n, static_cast<decltype(t)>(g));
    });
    adamw_step(state, gradient, 1, 1e-3, step, options, values);
    expected = 0.999 * expected + 0.001 * g * g;
    if (step % 1000 != 0) continue;
    double mean = 0;
    for (std::int64_t i = 0; i < n; ++i) mean += element(state.moment2, i) / static_cast<double>(n);
    EXPECT_NEAR(mean, expected, 0.01 * expected) << "step " << step;
  }
}

TEST_P(Optimizer, SumOfSquares) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  for (const std::int64_t n : {0, 1, 15, 16, 100003}) {
    const Tensor x = draw.tensor({n}, GetParam());
    double expected = 0;
    for (double v : elements(x)) expected += v * v;
    EXPECT_NEAR(sum_of_squares(x), expected, 1e-12 * expected);
  }
}

}  // namespace
}  // namespace ballast
