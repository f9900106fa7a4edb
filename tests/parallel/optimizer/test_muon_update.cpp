// Muon over ranks: stages 0 and 1 and any number of ranks train alike, and the state is sharded
// with one moment for its matrices.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/model/muon_table.hpp"
#include "tests/parallel/small_training.hpp"

namespace ballast {
namespace {

using namespace testing;

class MuonRanks : public ::testing::Test {
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
  static SmallOptions options(int zero, DType type) {
    SmallOptions options;
    options.zero = zero;
    options.type = type;
    options.muon = MuonOptions{};
    return options;
  }
};

TEST_F(MuonRanks, StagesTrainAlikeBitForBit) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining zero0(mesh, options(0, DType::f32)), zero1(mesh, options(1, DType::f32));
  for (std::int64_t step = 1; step <= 4; ++step) {
    EXPECT_EQ(zero0.gradients(samples), zero1.gradients(samples));
    for (SmallTraining* t : {&zero0, &zero1}) t->update(3e-3, step);
    ASSERT_TRUE(bit_equal(zero0.parameters.values(), zero1.parameters.values())) << step;
  }
}

TEST_F(MuonRanks, ManyRanksFollowOne) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining one(alone(), options(1, DType::f64)), many(mesh, options(1, DType::f64));
  double first = 0, last = 0;
  for (std::int64_t step = 1; step <= 10; ++step) {
    last = one.gradients(samples);
    if (step == 1) first = last;
    EXPECT_NEAR(many.gradients(samples), last, 1e-7 * last);
    one.update(1e-2, step);
    many.update(1e-2, step);
  }
  EXPECT_LT(last, first) << "it learns";
  const std::int64_t n = one.parameters.numel();
  EXPECT_LT(relative_error(elements(many.parameters.values().rows(0, n)),
                           elements(one.parameters.values().rows(0, n))),
            1e-7);
}

TEST_F(MuonRanks, MatricesHaveOneMoment) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining training(mesh, options(1, DType::f32));
  ShardedOptimizer& optimizer = training.optimizer;
  std::int64_t matrices = 0;
  for (const Parameter& p : training.parameters.table())
    if (muon_updates(p)) matrices += p.numel();
  EXPECT_EQ(optimizer.muon_elements(), matrices);
  const std::int64_t seconds = optimizer.state().moment2.numel();
  EXPECT_EQ(world.all_reduce(seconds, Reduction::sum),
            training.parameters.values().numel() - matrices);
  EXPECT_EQ(optimizer.state().moment1.numel(), optimizer.shard_size());
}

// Pieces of matrices go to the ranks that orthogonalise them and come back: what is sent is counted
// once, by who sends it.
TEST_F(MuonRanks, WhatGoesComesBack) {
  Recorder recorder;
  SmallOptions o = options(1, DType::f32);
  o.recorder = &recorder;
  SmallTraining training(mesh_of(shape), o);
  training.gradients(samples);
  recorder.flush([](std::span<const Event>) {});
  training.update(1e-3, 1);
  std::int64_t there = 0, back = 0;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events) {
      if (e.kind == EventKind::gradient_reduce) there += e.bytes;
      if (e.kind == EventKind::parameter_gather) back += e.bytes;
    }
  });
  // What is gathered of the values is beside it: the other ranks' shards.
  const std::int64_t values = training.parameters.values().numel() * 4,
                     gathered = values / world.size() * (world.size() - 1);
  there = world.all_reduce(there, Reduction::sum);
  back = world.all_reduce(back - gathered, Reduction::sum);
  const MuonShards shards =
      muon_shards(MuonWork::of(training.parameters.trainable_table()),
                  training.optimizer.shard_size(), world.size(), MuonOptions{}.steps);
  const std::int64_t lent =
      std::accumulate(shards.lent.begin(), shards.lent.end(), std::int64_t{0});
  EXPECT_EQ(there, 4 * lent);
  EXPECT_EQ(back, 4 * lent);
  EXPECT_EQ(lent > 0, world.size() > 1);
}

TEST_F(MuonRanks, WithoutALearningRateNothingDecays) {
  SmallTraining training(mesh_of(shape), options(1, DType::f32));
  const Tensor before = training.parameters.values().clone();
  training.gradients(samples);
  training.update(0, 1);
  EXPECT_TRUE(bit_equal(training.parameters.values(), before));
}

TEST_F(MuonRanks, MistakesAreErrors) {
  Parameters unordered(parameter_table(small_shape()), DType::f32, host_device(), world.size());
  EXPECT_THROW(ShardedOptimizer(unordered, world, 1, {}, nullptr, MuonOptions{}), Error);
  std::vector<Parameter> table = parameter_table(small_shape());
  order_for_muon(table);
  Parameters parameters(table, DType::f32, host_device(), world.size());
  EXPECT_THROW(ShardedOptimizer(parameters, world, 2, {}, nullptr, MuonOptions{}), Error);
}

}  // namespace
}  // namespace ballast
