// ZeRO: stages 0, 1 and 2 train alike; shards, norms and gathered gradients are what one rank would
// have.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/parallel/small_training.hpp"

namespace ballast {
namespace {

using namespace testing;

class Zero : public ::testing::Test {
 protected:
  const Communicator world = Communicator::world();
  std::vector<SampleLength> samples;
  MeshShape shape;
  void SetUp() override {
    for (std::int64_t tokens : {31, 12, 40, 7, 19})
      samples.push_back(sample_of(static_cast<std::int64_t>(samples.size()), tokens));
    shape.dp = world.size() > 1 ? 2 : 1;
    shape.cp_inner = world.size() / shape.dp;
  }
  SmallOptions stage(int zero, DType type = DType::f32) {
    SmallOptions options;
    options.zero = zero;
    options.type = type;
    return options;
  }
};

TEST_F(Zero, StagesTrainAlike) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining zero0(mesh, stage(0)), zero1(mesh, stage(1)), zero2(mesh, stage(2));
  for (std::int64_t step = 1; step <= 3; ++step) {
    const double loss = zero0.gradients(samples);
    EXPECT_EQ(zero1.gradients(samples), loss);
    // AdamW's first updates are nearly signs of the gradient, so rounding grows from one step to
    // the next.
    const double tolerance = step == 1 ? 1e-5 : 1e-3;
    EXPECT_NEAR(zero2.gradients(samples), loss, tolerance * loss);
    EXPECT_EQ(zero1.norm, zero0.norm);
    EXPECT_NEAR(zero2.norm, zero0.norm, tolerance * zero0.norm);
    for (SmallTraining* t : {&zero0, &zero1, &zero2}) t->update(3e-3, step);
    EXPECT_TRUE(bit_equal(zero0.parameters.values(), zero1.parameters.values())) << "step " << step;
    EXPECT_LT(
        relative_error(elements(zero2.parameters.values()), elements(zero0.parameters.values())),
        1e-3)
        << "step " << step;
  }
}

TEST_F(Zero, Fp64StagesFollowOneRank) {
  const Mesh& mesh = mesh_of(shape);
  SmallOptions one = stage(0, DType::f64);
  const Mesh alone(Communicator{}, MeshShape{});
  SmallTraining reference(alone, one);
  SmallTraining zero2(mesh, stage(2, DType::f64));
  double first_loss = 0, loss = 0;
  for (std::int64_t step = 1; step <= 4; ++step) {
    loss = reference.gradients(samples);
    if (step == 1) first_loss = loss;
    EXPECT_NEAR(zero2.gradients(samples), loss, 1e-7 * loss);
    reference.update(1e-2, step);
    zero2.update(1e-2, step);
  }
  EXPECT_LT(loss, first_loss) << "it learns";
}

TEST_F(Zero, EveryRankSeesTheWholeGradient) {
  const Mesh& mesh = mesh_of(shape);
  const Reference reference = reference_step(samples, DType::f64);
  for (int z : {0, 1, 2}) {
    SmallTraining training(mesh, stage(z, DType::f64));
    training.gradients(samples);
    for (std::size_t p = 0; p < reference.names.size(); p += 5) {
      const Tensor gradient = training.optimizer.full_gradient(reference.names[p]);
      EXPECT_EQ(gradient.shape(), training.parameters.info(reference.names[p]).shape);
      EXPECT_LT(relative_error(elements(gradient), reference.gradients[p]), 1e-10)
          << "zero " << z << " " << reference.names[p];
    }
  }
}

TEST_F(Zero, ShardsTileTheBufferAndMarkDecay) {
  const Mesh& mesh = mesh_of(shape);
  for (int z : {0, 1, 2}) {
    SmallTraining training(mesh, stage(z));
    const auto& optimizer = training.optimizer;
    const std::int64_t length = optimizer.shard_end() - optimizer.shard_begin(),
                       padded = training.parameters.values().numel();
    EXPECT_EQ(length, z == 0 ? padded : padded / world.size());
    EXPECT_EQ(optimizer.shard_begin(), z == 0 ? 0 : length * world.rank());
    const Tensor& ranges = training.optimizer.state().decay;
    std::vector<int> decay(static_cast<std::size_t>(length));
    for (std::int64_t r = 0; r < ranges.numel(); r += 2)
      for (std::int64_t i = ranges.data<std::int64_t>()[r]; i < ranges.data<std::int64_t>()[r + 1];
           ++i)
        ++decay.at(static_cast<std::size_t>(i));
    for (const Parameter& p : training.parameters.table()) {
      const std::int64_t first = training.parameters.offset(p.name);
      for (std::int64_t i = std::max(first, optimizer.shard_begin());
           i < std::min(first + p.numel(), optimizer.shard_end()); ++i)
        ASSERT_EQ(decay[static_cast<std::size_t>(i - optimizer.shard_begin())],
                  p.weight_decay ? 1 : 0)
            << p.name;
    }
  }
}

TEST_F(Zero, MasterAndValuesFollowEachOther) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining training(mesh, stage(1));
  auto& state = training.optimizer.state();
  for (std::int64_t i = 0; i < state.master.numel(); ++i)
    state.master.data<float>()[i] = static_cast<float>(training.optimizer.shard_begin() + i);
  training.optimizer.values_from_master();
  const float* values = training.parameters.values().data<float>();
  for (std::int64_t i = 0; i < training.parameters.values().numel(); ++i)
    ASSERT_EQ(values[i], static_cast<float>(i));
}

TEST_F(Zero, ReductionsAreRecorded) {
  const Mesh& mesh = mesh_of(shape);
  Recorder recorder;
  SmallOptions options = stage(2);
  options.recorder = &recorder;
  SmallTraining training(mesh, options);
  training.gradients(samples);
  training.update(1e-3, 1);
  std::int64_t reduced = 0, gathered = 0, optimizers = 0;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events) {
      if (e.kind == EventKind::gradient_reduce) reduced += e.bytes;
      if (e.kind == EventKind::parameter_gather) gathered += e.bytes;
      optimizers += e.kind == EventKind::optimizer;
    }
  });
  const std::int64_t others =
      training.parameters.values().numel() / world.size() * (world.size() - 1) * 4;
  EXPECT_EQ(gathered, others);
  EXPECT_EQ(optimizers, 1);
  if (others > 0) {
    EXPECT_GT(reduced, 0);
    EXPECT_EQ(reduced % others, 0);
  }
}

TEST_F(Zero, MistakesAreErrors) {
  Parameters parameters(parameter_table(small_shape()), DType::f32, host_device(), world.size());
  EXPECT_THROW(ShardedOptimizer(parameters, world, 3, {}, nullptr), Error);
  if (world.size() == 1) return;
  std::vector<Parameter> table = parameter_table(small_shape());
  Parameters unpadded(table, DType::f32, host_device(), 1);
  if (unpadded.values().numel() % world.size() != 0) {
    EXPECT_THROW(ShardedOptimizer(unpadded, world, 1, {}, nullptr), Error);
  }
}

}  // namespace
}  // namespace ballast
