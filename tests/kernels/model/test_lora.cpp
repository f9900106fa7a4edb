// Adapters: the model with them is the model with W + alpha / rank B A; gradients against central
// differences; dropout's masks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/model/stage_model.hpp"
#include "kernels/ops/dropout.hpp"
#include "kernels/ops/elementwise.hpp"
#include "tests/kernels/model/reference_model.hpp"
#include "tests/kernels/ops/numeric.hpp"

namespace ballast {
namespace {

using namespace numeric;

ModelShape shape_with(const std::vector<Projection>& projections, double dropout_rate = 0) {
  ModelShape s = reference::small_shape();
  s.qkv_bias = true;
  s.lora = {3, 5.0, dropout_rate, projections, 99};
  return s;
}

struct Adapted {
  ModelShape shape;
  Parameters parameters;
  reference::Tokens tokens;
  LocalBatch batch;

  Adapted(const ModelShape& s, Draw& draw, std::int64_t length)
      : shape(s), parameters(parameter_table(s), DType::f64, host_device(), 8) {
    for (const Parameter& p : parameters.table())
      draw.fill(parameters.value(p.name), p.shape.size() == 2 ? 0.3 : 0.2,
                p.initialiser == Initialiser::ones ? 1 : 0);
    for (std::int64_t p = 0; p < length; ++p) {
      tokens.token.push_back(static_cast<std::int32_t>(draw.integer(0, s.vocabulary - 1)));
      tokens.target.push_back(static_cast<std::int32_t>(draw.integer(0, s.vocabulary - 1)));
      tokens.position.push_back(static_cast<std::int32_t>(p));
      tokens.segment.push_back(0);
    }
    batch = {from_list(tokens.token),
             from_list(tokens.target),
             from_list(tokens.position),
             {},
             tokens.segment};
  }
  void name_tokens(Draw& draw) {
    batch.dropout_keys = Tensor::empty({batch.size()}, DType::i64);
    for (std::int64_t t = 0; t < batch.size(); ++t)
      batch.dropout_keys.data<std::int64_t>()[t] = draw.integer(0, 1ll << 60);
  }
  /// Weights of the plain model that should compute the same.
  std::vector<double> merged(const std::string& name) const {
    std::vector<double> w = elements(parameters.value(name));
    if (!name.ends_with(".weight")) return w;
    const std::string module = name.substr(0, name.size() - 7);
    if (!parameters.contains(module + ".lora_A.weight")) return w;
    const Tensor a = parameters.value(module + ".lora_A.weight"),
                 b = parameters.value(module + ".lora_B.weight");
    const std::int64_t rank = a.size(0), in = a.size(1);
    for (std::int64_t o = 0; o < b.size(0); ++o)
      for (std::int64_t i = 0; i < in; ++i)
        for (std::int64_t r = 0; r < rank; ++r)
          w[static_cast<std::size_t>(o * in + i)] +=
              5.0 / 3.0 * element(b, o * rank + r) * element(a, r * in + i);
    return w;
  }
  double reference_objective() const {
    ModelShape plain = shape;
    plain.lora = {};
    double sum = 0;
    for (double loss : reference::token_losses(
             plain, [this](const std::string& name) { return merged(name); }, tokens))
      sum += loss;
    return sum;
  }
  double objective(RecomputeOptions recompute = {}, bool backward = false, bool halves = false) {
    StageModel model(shape, 0, shape.layers, parameters, recompute, nullptr, 4);
    reference::NaiveAttention attention{tokens.segment, tokens.position};
    StageActivationsPtr saved;
    const double loss = model.forward(batch, {}, attention, &saved).loss_sum();
    if (backward && halves) {
      model.backward_input(batch, *saved, attention, {});
      model.backward_weight(std::move(saved));
    } else if (backward) {
      model.backward(batch, std::move(saved), attention, {});
    }
    return loss;
  }
  void expect_gradients(Draw& draw, const std::function<double()>& f) {
    for (const Parameter& p : parameters.trainable_table()) {
      SCOPED_TRACE(p.name);
      const Tensor value = parameters.value(p.name), gradient = parameters.gradient(p.name);
      const Tensor direction = draw.tensor(p.shape, DType::f64), kept = value.clone();
      const double along = derivative([&](double h) {
        for (std::int64_t i = 0; i < value.numel(); ++i)
          value.data<double>()[i] = kept.data<double>()[i] + h * direction.data<double>()[i];
        return f();
      });
      Tensor(value).copy_from(kept);
      EXPECT_NEAR(
          dot(gradient, direction), along,
          1e-6 * (1 + std::abs(along)));  // the step's cubic term reaches 3e-7 for some draws
      EXPECT_GT(std::sqrt(dot(gradient, gradient)), 1e-6);
    }
  }
};

TEST(Lora, EqualsTheModelWithMergedWeights) {
  for (const auto& projections :
       {lora_projections(), std::vector<Projection>{Projection::q, Projection::v},
        std::vector<Projection>{Projection::up, Projection::k}}) {
    Draw draw;
    SCOPED_TRACE(draw.trace());
    Adapted model(shape_with(projections), draw, 11);
    EXPECT_EQ(model.parameters.trainable_table().size(), 2 * 2 * projections.size());
    EXPECT_NEAR(model.objective(), model.reference_objective(),
                1e-11 * model.reference_objective());
    // Evaluation does not drop, whatever the deck says.
    model.shape.lora.dropout = 0.5;
    EXPECT_NEAR(model.objective(), model.reference_objective(),
                1e-11 * model.reference_objective());
  }
}

TEST(Lora, GradientsAgreeWithCentralDifferences) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Adapted model(shape_with(lora_projections()), draw, 9);
  model.objective({}, true);
  model.expect_gradients(draw, [&] { return model.reference_objective(); });
}

TEST(Lora, GradientsUnderDropoutAndRecomputation) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Adapted model(shape_with(lora_projections(), 0.3), draw, 9);
  const double all = model.objective();
  model.name_tokens(draw);
  EXPECT_GT(std::abs(model.objective() - all), 1e-6);
  model.objective({}, true);
  model.expect_gradients(draw, [&] { return model.objective(); });
  const Tensor kept = model.parameters.gradients().clone();
  for (const Recompute mode : {Recompute::none, Recompute::selective, Recompute::full})
    for (const bool halves : {false, true}) {
      model.parameters.gradients().zero();
      model.objective({mode, -1}, true, halves);
      EXPECT_TRUE(bit_equal(model.parameters.gradients(), kept));
    }
}

TEST(Lora, FrozenWeightsHaveNoGradientMemory) {
  const ModelShape shape = shape_with({Projection::q, Projection::down});
  const Parameters parameters(parameter_table(shape), DType::f32, host_device(), 4);
  std::int64_t adapters = 0, frozen = 0;
  for (const Parameter& p : parameters.table()) {
    EXPECT_EQ(p.trainable, p.name.find(".lora_") != std::string::npos) << p.name;
    (p.trainable ? adapters : frozen) += p.numel();
    EXPECT_EQ(parameters.gradient(p.name).defined(), p.trainable);
  }
  EXPECT_EQ(adapters, 2 * (3 * (12 + 24) + 3 * (10 + 12)));
  EXPECT_EQ(parameters.trainable_numel(), adapters);
  EXPECT_EQ(parameters.frozen_numel(), frozen);
  EXPECT_EQ(Parameters(parameters).gradients().numel(), (adapters + 3) / 4 * 4);
  auto mixed = parameter_table(shape);
  std::reverse(mixed.begin(), mixed.end());
  EXPECT_THROW(Parameters(mixed, DType::f32, host_device()), Error);
  // A begins with what a plain model does not know, B with nothing: the first output is the base's.
  Parameters fresh(parameter_table(shape), DType::f64, host_device());
  fresh.initialise(4);
  EXPECT_EQ(dot(fresh.value("model.layers.1.mlp.down_proj.lora_B.weight"),
                fresh.value("model.layers.1.mlp.down_proj.lora_B.weight")),
            0.0);
  const Tensor a = fresh.value("model.layers.1.mlp.down_proj.lora_A.weight");
  EXPECT_NEAR(dot(a, a) / static_cast<double>(a.numel()), 1.0 / 30, 0.03);
}

TEST(Dropout, MasksFollowTokensAndPlacesAlone) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t tokens = 300, width = 83;
  const Tensor wide = draw.tensor({tokens, width + 9}, DType::f32, 1.0, 3.0),
               x = wide.narrow(1, 4, 4 + width);
  Tensor keys = Tensor::empty({tokens}, DType::i64), y = Tensor::empty({tokens, width}, DType::f32);
  for (std::int64_t t = 0; t < tokens; ++t) keys.data<std::int64_t>()[t] = t * t - 7;
  dropout(x, keys, 5, 0.25, 2.0, y);
  std::int64_t dropped = 0;
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const double found = element(y, i), given = element(x, i);
    if (found == 0)
      ++dropped;
    else
      ASSERT_EQ(found, static_cast<double>(static_cast<float>(2 * given)));
  }
  EXPECT_NEAR(static_cast<double>(dropped) / static_cast<double>(y.numel()), 0.25, 0.015);
  // Rows in another order, one by one, in place: each token drops the same.
  for (const std::int64_t t : {std::int64_t{299}, std::int64_t{0}, std::int64_t{17}}) {
    Tensor row = Tensor::empty({1, width}, DType::f32);
    for (std::int64_t c = 0; c < width; ++c)
      row.data<float>()[c] = static_cast<float>(element(x, t * width + c));
    dropout(row, keys.rows(t, t + 1), 5, 0.25, 2.0, row);
    EXPECT_TRUE(bit_equal(row, y.rows(t, t + 1)));
  }
  Tensor other = Tensor::empty({tokens, width}, DType::f32);
  dropout(x, keys, 6, 0.25, 2.0, other);
  EXPECT_FALSE(bit_equal(other, y));
  Tensor sum = Tensor::empty({tokens, width}, DType::f32);
  copy_rows(x, sum);
  dropout(x, keys, 5, 0.25, 2.0, sum, true);
  for (std::int64_t i = 0; i < y.numel(); ++i)
    ASSERT_NEAR(element(sum, i), element(x, i) + element(y, i), 1e-5);
  EXPECT_THROW(dropout(x, {}, 0, 0.1, 1, other), Error);
  for (const double rate : {0.0, 1.0})
    EXPECT_THROW(dropout(x, keys, 0, rate, 1, other), Error) << rate;
}

// The shares of single columns, pairs and tokens, and that the scale keeps the mean.
TEST(Dropout, ElementsStayAtTheRateAlone) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::int64_t tokens = 4000, width = 48;
  const double rate = static_cast<double>(draw.integer(100, 700)) / 1000, p = dropout_kept(rate);
  EXPECT_NEAR(p, 1 - rate, 1.0 / 65536);
  EXPECT_EQ(dropout_kept(1e-9), 1.0);
  EXPECT_EQ(dropout_kept(1 - 1e-9), 1.0 / 65536);
  Tensor ones = Tensor::empty({tokens, width}, DType::f64), y = ones,
         keys = Tensor::empty({tokens}, DType::i64);
  std::fill_n(ones.data<double>(), ones.numel(), 1.0);
  for (std::int64_t t = 0; t < tokens; ++t)
    keys.data<std::int64_t>()[t] = draw.integer(0, 1ll << 60);
  dropout(ones, keys, 11, rate, 1 / p, y);
  std::vector<double> column(static_cast<std::size_t>(width)), pair = column;
  double mean = 0;
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const bool stays = element(y, i) != 0;
    const auto c = static_cast<std::size_t>(i % width);
    column[c] += stays;
    pair[c] += stays && element(y, i % width + 1 < width ? i + 1 : i + 1 - width) != 0;
    mean += element(y, i) / static_cast<double>(y.numel());
  }
  // Five standard errors.
  const auto error = [&](double share, double n) { return 5 * std::sqrt(share * (1 - share) / n); };
  const auto n = static_cast<double>(tokens);
  EXPECT_NEAR(p * mean, p, error(p, n * width));
  for (std::size_t c = 0; c < column.size(); ++c) {
    EXPECT_NEAR(column[c] / n, p, error(p, n)) << "column " << c;
    EXPECT_NEAR(pair[c] / n, p * p, error(p * p, n)) << "columns " << c << " and the next";
  }
}

}  // namespace
}  // namespace ballast
