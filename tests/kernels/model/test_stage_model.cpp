// The whole model against an independent fp64 reference, and its gradients against central
// differences of that reference.
#include <gtest/gtest.h>

#include <cstring>

#include "core/model/tensor_specs.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/local_attention.hpp"
#include "kernels/model/stage_model.hpp"
#include "tests/kernels/model/reference_model.hpp"
#include "tests/kernels/ops/numeric.hpp"

namespace ballast {
namespace {

using namespace numeric;
using reference::small_shape;

struct Case {
  const char* name;
  bool tied, bias;
  std::int64_t kv_heads;
  double yarn, llama3;
  bool qk_norm = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// A model with random parameters (norms and biases too) and a packed micro-batch: positions restart
// in every segment, one segment of one token, some tokens without loss.
struct Example {
  ModelShape shape;
  Parameters parameters;
  reference::Tokens tokens;
  LocalBatch batch;

  Example(const ModelShape& s, DType type, Draw& draw, const std::vector<std::int64_t>& lengths)
      : shape(s), parameters(parameter_table(s), type, host_device(), 8) {
    for (const Parameter& p : parameters.table())
      draw.fill(parameters.value(p.name), p.shape.size() == 2 ? 0.3 : 0.2,
                p.initialiser == Initialiser::ones ? 1 : 0);
    for (std::size_t i = 0; i < lengths.size(); ++i)
      for (std::int64_t p = 0; p < lengths[i]; ++p) {
        tokens.token.push_back(static_cast<std::int32_t>(draw.integer(0, s.vocabulary - 1)));
        tokens.target.push_back(draw.integer(0, 4) == 0
                                    ? -1
                                    : static_cast<std::int32_t>(draw.integer(0, s.vocabulary - 1)));
        tokens.position.push_back(static_cast<std::int32_t>(p));
        tokens.segment.push_back(static_cast<std::int32_t>(i));
      }
    batch = {from_list(tokens.token),
             from_list(tokens.target),
             from_list(tokens.position),
             {},
             tokens.segment};
  }
  reference::NaiveAttention attention() const { return {tokens.segment, tokens.position}; }
  reference::Lookup lookup() const {
    return [this](const std::string& name) { return elements(parameters.value(name)); };
  }
  double reference_objective() const {
    const std::vector<double> losses = reference::token_losses(shape, lookup(), tokens);
    double sum = 0;
    for (std::size_t t = 0; t < losses.size(); ++t)
      sum += losses[t] * (batch.loss_weights.defined()
                              ? element(batch.loss_weights, static_cast<std::int64_t>(t))
                              : 1.0);
    return sum;
  }
};

// Forward and backward of one stage holding the whole model.
double run(Example& setup, RecomputeOptions recompute, std::int64_t head_chunk = 5,
           double scale = 1.0) {
  StageModel model(setup.shape, 0, setup.shape.layers, setup.parameters, recompute, nullptr,
                   head_chunk);
  auto attention = setup.attention();
  StageActivationsPtr saved;
  setup.batch.loss_scale = scale;
  const double loss = model.forward(setup.batch, {}, attention, &saved).loss_sum();
  model.backward(setup.batch, std::move(saved), attention, {});
  return loss;
}

class ModelCases : public ::testing::TestWithParam<Case> {
 protected:
  ModelShape shape() const {
    ModelShape s = small_shape();
    s.tied_embedding = GetParam().tied;
    s.qkv_bias = GetParam().bias;
    s.kv_heads = GetParam().kv_heads;
    s.yarn_factor = GetParam().yarn;
    s.llama3_factor = GetParam().llama3;
    s.qk_norm = GetParam().qk_norm;
    return s;
  }
};

TEST_P(ModelCases, LossIsTheReferences) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Example setup(shape(), DType::f64, draw, {9, 1, 6});
  const auto expected = reference::token_losses(setup.shape, setup.lookup(), setup.tokens);
  StageModel model(setup.shape, 0, setup.shape.layers, setup.parameters, {}, nullptr, 4);
  auto attention = setup.attention();
  const StageOutput output = model.forward(setup.batch, {}, attention, nullptr);
  EXPECT_LT(relative_error(output.token_loss, expected), 1e-12);
  double sum = 0;
  for (double loss : expected) sum += loss;
  EXPECT_NEAR(output.loss_sum(), sum, 1e-11 * sum);
}

TEST_P(ModelCases, EveryGradientAgreesWithCentralDifferencesOfTheReference) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Example setup(shape(), DType::f64, draw, {5, 1, 4});
  setup.batch.loss_weights = draw.tensor({10}, DType::f64, 0.5, 1.0);
  run(setup, {}, 3, 0.37);
  for (const Parameter& p : setup.parameters.table()) {
    SCOPED_TRACE(p.name);
    const Tensor value = setup.parameters.value(p.name),
                 gradient = setup.parameters.gradient(p.name);
    // Along a random direction of length 1: sees every element of the tensor at once.
    const Tensor direction = draw.tensor(p.shape, DType::f64), kept = value.clone();
    const double length = std::sqrt(dot(direction, direction)),
                 size = std::sqrt(dot(gradient, gradient));
    const double along = derivative([&](double h) {
      for (std::int64_t i = 0; i < value.numel(); ++i)
        value.data<double>()[i] = kept.data<double>()[i] + h / length * direction.data<double>()[i];
      return 0.37 * setup.reference_objective();
    });
    Tensor(value).copy_from(kept);
    EXPECT_NEAR(dot(gradient, direction) / length, along, 1e-7 * (1 + size));
    // And along a few single elements.
    for (int trial = 0; trial < 3; ++trial) {
      const std::int64_t i = draw.integer(0, value.numel() - 1);
      double& x = value.data<double>()[i];
      const double before = x;
      const double expected =
          derivative([&](double h) { return x = before + h, 0.37 * setup.reference_objective(); });
      x = before;
      EXPECT_NEAR(gradient.data<double>()[i], expected, 1e-7 * (1 + size));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ModelCases,
                         ::testing::Values(Case{"plain", false, false, 4, 1, 1},
                                           Case{"qwen", true, true, 2, 1, 1},
                                           Case{"yarn", false, true, 1, 4, 1},
                                           Case{"llama3", false, false, 2, 1, 8},
                                           Case{"qwen3", true, false, 2, 1, 1, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Model, FloatAgreesWithDouble) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  ModelShape shape = small_shape();
  shape.qkv_bias = true;
  shape.hidden = 40;
  shape.intermediate = 72;
  Example exact(shape, DType::f64, draw, {20, 13, 1});
  Example single = exact;
  single.parameters = Parameters(parameter_table(shape), DType::f32, host_device());
  for (const Parameter& p : exact.parameters.table())
    single.parameters.value(p.name).copy_from(
        converted(exact.parameters.value(p.name), DType::f32));
  const double a = run(exact, {}), b = run(single, {});
  EXPECT_NEAR(b, a, 1e-4 * a);
  for (const Parameter& p : exact.parameters.table())
    EXPECT_LT(relative_error(single.parameters.gradient(p.name), exact.parameters.gradient(p.name)),
              2e-4)
        << p.name;
}

TEST(Model, PackedEqualsEachSampleAlone) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  const std::vector<std::int64_t> lengths = {7, 1, 12, 3};
  ModelShape shape = small_shape();
  shape.tied_embedding = true;
  Example packed(shape, DType::f64, draw, lengths);
  const double loss = run(packed, {});
  const Tensor gradient = packed.parameters.gradients().clone();
  packed.parameters.gradients().zero();
  double alone = 0;
  std::int64_t begin = 0;
  for (std::int64_t length : lengths) {
    Example one = packed;  // shares the parameters' buffers
    const auto cut = [&](std::vector<std::int32_t>& list) {
      list = {list.begin() + begin, list.begin() + begin + length};
    };
    for (auto* list :
         {&one.tokens.token, &one.tokens.target, &one.tokens.position, &one.tokens.segment})
      cut(*list);
    one.batch = {from_list(one.tokens.token),
                 from_list(one.tokens.target),
                 from_list(one.tokens.position),
                 {},
                 one.tokens.segment};
    alone += run(one, {});
    begin += length;
  }
  EXPECT_NEAR(alone, loss, 1e-12 * loss);
  EXPECT_LT(relative_error(packed.parameters.gradients(), gradient), 1e-12);
}

TEST(Model, TwoStagesEqualOne) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  ModelShape shape = small_shape();
  shape.layers = 3;
  Example setup(shape, DType::f64, draw, {11, 4});
  const double loss = run(setup, {});
  const Tensor gradient = setup.parameters.gradients().clone();
  setup.parameters.gradients().zero();

  StageModel front(shape, 0, 1, setup.parameters, {}, nullptr),
      back(shape, 1, 3, setup.parameters, {}, nullptr);
  EXPECT_TRUE(front.first() && !front.last() && !back.first() && back.last());
  auto attention = setup.attention();
  StageActivationsPtr front_saved, back_saved;
  const Tensor hidden = front.forward(setup.batch, {}, attention, &front_saved).hidden;
  EXPECT_NEAR(back.forward(setup.batch, hidden, attention, &back_saved).loss_sum(), loss,
              1e-12 * loss);
  const Tensor d_hidden = back.backward(setup.batch, std::move(back_saved), attention, {});
  EXPECT_FALSE(front.backward(setup.batch, std::move(front_saved), attention, d_hidden).defined());
  EXPECT_LT(relative_error(setup.parameters.gradients(), gradient), 1e-13);
}

TEST(Model, HeadChunksDoNotMatter) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Example setup(small_shape(), DType::f64, draw, {13, 8});
  const double loss = run(setup, {}, 1000);
  const Tensor gradient = setup.parameters.gradients().clone();
  for (std::int64_t chunk : {1, 4, 21}) {
    setup.parameters.gradients().zero();
    EXPECT_NEAR(run(setup, {}, chunk), loss, 1e-12 * loss);
    EXPECT_LT(relative_error(setup.parameters.gradients(), gradient), 1e-12) << chunk;
  }
}

TEST(Model, ARankWithoutTokensTakesPart) {
  Draw draw;
  Example setup(small_shape(), DType::f32, draw, {});
  for (std::int64_t i = 0; i < setup.parameters.trainable_numel(); ++i)
    setup.parameters.gradients().data<float>()[i] = NAN;
  setup.parameters.clear_gradients();
  EXPECT_EQ(run(setup, {Recompute::full, -1}), 0.0);
  setup.parameters.settle_gradients();
  for (double g : elements(setup.parameters.gradients())) EXPECT_EQ(g, 0.0);
}

TEST(Model, GradientsAddUpOverMicroBatches) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Example setup(small_shape(), DType::f64, draw, {6, 3});
  run(setup, {});
  std::vector<double> once = elements(setup.parameters.gradients());
  run(setup, {});
  for (double& g : once) g *= 2;
  EXPECT_LT(relative_error(setup.parameters.gradients(), once), 1e-13);
  for (std::int64_t i = 0; i < setup.parameters.trainable_numel(); ++i)
    setup.parameters.gradients().data<double>()[i] = NAN;
  setup.parameters.clear_gradients();  // the first contribution overwrites
  run(setup, {});
  run(setup, {});
  setup.parameters.settle_gradients();
  EXPECT_LT(relative_error(setup.parameters.gradients(), once), 1e-13);
}

TEST(Model, BadInputIsRefusedWithItsPlace) {
  Draw draw;
  Example setup(small_shape(), DType::f32, draw, {4});
  auto attention = setup.attention();
  StageModel model(setup.shape, 0, 2, setup.parameters, {}, nullptr);
  LocalBatch bad = setup.batch;
  bad.tokens = from_list({0, 1, 99, 2});
  EXPECT_THROW(model.forward(bad, {}, attention, nullptr), Error);
  bad = setup.batch;
  bad.targets = from_list({0, 1, 17, 2});
  EXPECT_THROW(model.forward(bad, {}, attention, nullptr), Error);
  bad = setup.batch;
  bad.positions = from_list({0, 1});
  EXPECT_THROW(model.forward(bad, {}, attention, nullptr), Error);
  EXPECT_THROW(model.backward(setup.batch, nullptr, attention, {}), Error);
  EXPECT_THROW(StageModel(setup.shape, 2, 2, setup.parameters, {}, nullptr), Error);
  EXPECT_THROW(StageModel(setup.shape, 0, 3, setup.parameters, {}, nullptr), Error);
  ModelShape impossible = setup.shape;
  impossible.kv_heads = 3;
  EXPECT_THROW(StageModel(impossible, 0, 2, setup.parameters, {}, nullptr), Error);
}

TEST(Model, ANanReachesTheLoss) {
  Draw draw;
  Example setup(small_shape(), DType::f32, draw, {4});
  setup.tokens.target = {1, 2, 3, 4};
  setup.batch.targets = from_list(setup.tokens.target);
  setup.parameters.value("model.layers.1.mlp.gate_proj.weight").data<float>()[3] = NAN;
  EXPECT_TRUE(std::isnan(run(setup, {})));
}

// Recomputation.

class RecomputeCases : public ::testing::TestWithParam<std::pair<DType, RecomputeOptions>> {
 protected:
  /// Four layers, with biases or with QK-norm, whose q and k are made again.
  static ModelShape shape(bool qk_norm) {
    ModelShape s = small_shape();
    s.layers = 4;
    s.qkv_bias = !qk_norm;
    s.qk_norm = qk_norm;
    return s;
  }
};

TEST_P(RecomputeCases, OnEqualsOffBitForBit) {
  const auto [type, options] = GetParam();
  Draw draw;
  SCOPED_TRACE(draw.trace());
  for (const bool qk_norm : {false, true}) {
    ModelShape shape = this->shape(qk_norm);
    shape.hidden = 52;
    shape.intermediate = 91;
    Example setup(shape, type, draw, {23, 1, 14});
    const double loss = run(setup, {});
    const Tensor gradient = setup.parameters.gradients().clone();
    setup.parameters.gradients().zero();
    EXPECT_EQ(run(setup, options), loss);
    EXPECT_TRUE(bit_equal(setup.parameters.gradients(), gradient)) << qk_norm;
  }
}

/// Bytes of the rotary table, of what each layer keeps and of the last hidden states.
std::int64_t kept_by_forward(const ModelShape& shape, std::int64_t tokens, DType type,
                             RecomputeOptions recompute) {
  const auto statistic = static_cast<std::int64_t>(size_of(statistics_type(type))),
             element = static_cast<std::int64_t>(size_of(type));
  std::int64_t bytes = tokens * (shape.head_dim * statistic + shape.hidden * element);
  for (std::int64_t l = 0; l < shape.layers; ++l)
    bytes += kept_bytes(shape, tokens, type, keep_of(recompute.of(l)));
  return bytes;
}

TEST_P(RecomputeCases, ActivationBytesAreWhatForwardKeeps) {
  const auto [type, options] = GetParam();
  for (const bool qk_norm : {false, true}) {
    Draw draw;
    const ModelShape shape = this->shape(qk_norm);
    Example setup(shape, type, draw, {31, 6});
    StageModel model(shape, 0, 4, setup.parameters, options, nullptr);
    auto attention = setup.attention();
    const int category = static_cast<int>(MemoryCategory::activations);
    const std::int64_t before = memory_use().current[category];
    StageActivationsPtr saved;
    model.forward(setup.batch, {}, attention, &saved);
    EXPECT_EQ(memory_use().current[category] - before, kept_by_forward(shape, 37, type, options));
    reset_peak_memory();
    model.backward(setup.batch, std::move(saved), attention, {});
    EXPECT_EQ(memory_use().current[category], before);
    EXPECT_EQ(memory_use().peak[category] - before, kept_by_forward(shape, 37, type, options));
  }
}

// Two micro-batches, their halves interleaved.
TEST_P(RecomputeCases, HalvesOfBackwardEqualItBitForBit) {
  const auto [type, options] = GetParam();
  for (const bool qk_norm : {false, true}) {
    Draw draw;
    SCOPED_TRACE(draw.trace());
    ModelShape shape = this->shape(qk_norm);
    shape.tied_embedding = true;
    Example setup(shape, type, draw, {23, 1, 14});
    run(setup, options);
    run(setup, options, 5, 0.25);
    const Tensor gradient = setup.parameters.gradients().clone();
    setup.parameters.gradients().zero();
    StageModel model(shape, 0, 4, setup.parameters, options, nullptr, 5);
    auto attention = setup.attention();
    const int category = static_cast<int>(MemoryCategory::activations);
    const std::int64_t before = memory_use().current[category],
                       half = shape.layers * between_halves_bytes(shape, 38, type);
    StageActivationsPtr saved[2];
    for (const int i : {0, 1}) {
      setup.batch.loss_scale = i == 0 ? 1.0 : 0.25;
      model.forward(setup.batch, {}, attention, &saved[i]);
      EXPECT_THROW(model.backward_weight(StageActivationsPtr()), Error);
      model.backward_input(setup.batch, *saved[i], attention, {});
      EXPECT_EQ(memory_use().current[category] - before, (i + 1) * half);
      EXPECT_THROW(model.backward_input(setup.batch, *saved[i], attention, {}), Error) << "twice";
    }
    EXPECT_FALSE(bit_equal(setup.parameters.gradients(), gradient)) << "weights are still to come";
    for (StageActivationsPtr& s : saved) model.backward_weight(std::move(s));
    EXPECT_TRUE(bit_equal(setup.parameters.gradients(), gradient));
    EXPECT_EQ(memory_use().current[category], before);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, RecomputeCases,
    ::testing::Values(std::pair{DType::f32, RecomputeOptions{Recompute::none, -1}},
                      std::pair{DType::f32, RecomputeOptions{Recompute::selective, -1}},
                      std::pair{DType::f32, RecomputeOptions{Recompute::selective, 2}},
                      std::pair{DType::f32, RecomputeOptions{Recompute::full, -1}},
                      std::pair{DType::f32, RecomputeOptions{Recompute::full, 2}},
                      std::pair{DType::f32, RecomputeOptions{Recompute::full, 0}},
                      std::pair{DType::f64, RecomputeOptions{Recompute::selective, -1}},
                      std::pair{DType::f64, RecomputeOptions{Recompute::full, 3}}));

TEST(Recompute, RunsAttentionAgainOnlyForFullLayers) {
  Draw draw;
  Example setup(small_shape(), DType::f32, draw, {5});
  const auto forwards = [&](RecomputeOptions options) {
    StageModel model(setup.shape, 0, 2, setup.parameters, options, nullptr);
    auto attention = setup.attention();
    StageActivationsPtr saved;
    model.forward(setup.batch, {}, attention, &saved);
    model.backward(setup.batch, std::move(saved), attention, {});
    return attention.forwards;
  };
  EXPECT_EQ(forwards({Recompute::none, -1}), 2);
  EXPECT_EQ(forwards({Recompute::selective, -1}), 2);
  EXPECT_EQ(forwards({Recompute::full, 1}), 3);
  EXPECT_EQ(forwards({Recompute::full, -1}), 4);
}

ModelShape fp8_shape(std::int64_t intermediate = 144, bool qk_norm = false) {
  ModelShape s = small_shape();
  s.hidden = 48, s.head_dim = 16, s.intermediate = intermediate, s.qkv_bias = !qk_norm;
  s.qk_norm = qk_norm;
  return s;
}

class Fp8Model : public testing::TestWithParam<std::pair<int, bool>> {};

/// In whole blocks SwiGLU's gradient is rounded where it is made, but for halves.
TEST_P(Fp8Model, RecomputationAndHalvesRepeatBits) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Example setup(fp8_shape(GetParam().first, GetParam().second), DType::f32, draw, {90, 1, 60});
  for (const Parameter& p : setup.parameters.table())  // so that a layer does not magnify errors
    if (p.shape.size() == 2) draw.fill(setup.parameters.value(p.name), 0.1);
  const auto gradients = [&](RecomputeOptions options, bool halves, bool fp8) {
    setup.parameters.gradients().zero();
    StageModel model(setup.shape, 0, 2, setup.parameters, options, nullptr, 5, fp8);
    auto attention = setup.attention();
    StageActivationsPtr saved;
    model.forward(setup.batch, {}, attention, &saved);
    if (halves) {
      model.backward_input(setup.batch, *saved, attention, {});
      model.backward_weight(std::move(saved));
    } else {
      model.backward(setup.batch, std::move(saved), attention, {});
    }
    return setup.parameters.gradients().clone();
  };
  const Tensor once = gradients({}, false, true), plain = gradients({}, false, false);
  for (const auto& [mode, halves] :
       {std::pair{Recompute::selective, false}, {Recompute::full, false}, {Recompute::none, true}})
    EXPECT_TRUE(bit_equal(gradients({mode, -1}, halves, true), once)) << name(mode) << halves;
  const double apart = relative_error(once, plain);
  EXPECT_GT(apart, 1e-3);
  EXPECT_LT(apart, 0.25);
}

INSTANTIATE_TEST_SUITE_P(IntermediateAndQkNorm, Fp8Model,
                         testing::Values(std::pair{144, false}, std::pair{256, false},
                                         std::pair{144, true}));

TEST(Fp8Weights, FollowTheParameters) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  Example setup(fp8_shape(), DType::f32, draw, {20});
  StageModel model(setup.shape, 0, 2, setup.parameters, {}, nullptr, 5, true);
  const auto loss = [&] {
    auto attention = setup.attention();
    return model.forward(setup.batch, {}, attention, nullptr).loss_sum();
  };
  const double before = loss();
  EXPECT_EQ(loss(), before);
  draw.fill(setup.parameters.value("model.layers.1.mlp.down_proj.weight"), 0.5);
  setup.parameters.values_changed();
  EXPECT_NE(loss(), before);
}

// Blocked attention over a dense index in place of the naive one; bit equality of recomputation
// holds for it too.
TEST(Model, LocalAttentionAgreesWithTheDefinition) {
  Draw draw;
  SCOPED_TRACE(draw.trace());
  ModelShape shape = small_shape();
  shape.head_dim = 16;
  for (const DType type : {DType::f32, DType::f64}) {
    Example setup(shape, type, draw, {70, 1, 129, 3});
    const double naive = run(setup, {});
    const Tensor expected = setup.parameters.gradients().clone();
    AxisRanges axis;
    for (std::size_t t = 0; t < setup.tokens.token.size(); ++t)
      append(axis, {setup.tokens.segment[t], setup.tokens.position[t], 1});
    const auto local = [&](RecomputeOptions options) {
      setup.parameters.gradients().zero();
      StageModel model(shape, 0, shape.layers, setup.parameters, options, nullptr);
      LocalAttention attention(dense_pattern(axis, axis));
      StageActivationsPtr saved;
      const double loss = model.forward(setup.batch, {}, attention, &saved).loss_sum();
      model.backward(setup.batch, std::move(saved), attention, {});
      return loss;
    };
    const double loss = local({});
    EXPECT_NEAR(loss, naive, tolerance(type, 1e-5, 1e-12) * naive);
    EXPECT_LT(relative_error(setup.parameters.gradients(), expected), tolerance(type, 1e-4, 1e-11));
    const Tensor kept = setup.parameters.gradients().clone();
    for (const RecomputeOptions options :
         {RecomputeOptions{Recompute::selective, -1}, RecomputeOptions{Recompute::full, 1},
          RecomputeOptions{Recompute::full, -1}}) {
      EXPECT_EQ(local(options), loss);
      EXPECT_TRUE(bit_equal(setup.parameters.gradients(), kept));
    }
  }
}

TEST(Model, EventsNameLayersAndFlops) {
  Draw draw;
  Example setup(small_shape(), DType::f32, draw, {9});
  Recorder recorder;
  recorder.context.micro_batch = 5;
  StageModel model(setup.shape, 0, 2, setup.parameters, {}, &recorder);
  auto attention = setup.attention();
  StageActivationsPtr saved;
  model.forward(setup.batch, {}, attention, &saved);
  model.backward(setup.batch, std::move(saved), attention, {});
  EXPECT_EQ(recorder.context.layer, -1);
  double flops = 0;
  std::vector<int> forward, backward;
  int heads = 0;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events) {
      EXPECT_EQ(e.micro_batch, 5);
      flops += e.flops;
      if (e.kind == EventKind::layer_forward) forward.push_back(e.layer);
      if (e.kind == EventKind::layer_backward) backward.push_back(e.layer);
      heads += e.kind == EventKind::head;
    }
  });
  EXPECT_EQ(forward, (std::vector<int>{0, 1}));
  EXPECT_EQ(backward, (std::vector<int>{1, 0}));
  EXPECT_EQ(heads, 1);
  EXPECT_DOUBLE_EQ(flops, setup.shape.training_flops(9, 0));
}

}  // namespace
}  // namespace ballast
