// ZeRO: stages 0, 1 and 2 train alike; shards, norms and gathered gradients are what one rank would
// have.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "tests/parallel/comm/host_stand_in.hpp"
#include "tests/parallel/small_training.hpp"

namespace ballast {
namespace {

using namespace testing;

/// Bit by bit, parameter by parameter: padding may differ.
bool same_values(const Parameters& a, const Parameters& b) {
  return std::all_of(a.table().begin(), a.table().end(), [&](const Parameter& p) {
    return bit_equal(a.value(p.name), b.value(p.name));
  });
}

class Zero : public ::testing::Test {
 protected:
  const Communicator world = Communicator::world();
  std::vector<SampleLength> samples;
  std::vector<SampleLength> even;  ///< with which data-parallel ranks are in step
  MeshShape shape;
  void SetUp() override {
    for (std::int64_t tokens : {31, 12, 40, 7, 19})
      samples.push_back(sample_of(static_cast<std::int64_t>(samples.size()), tokens));
    for (std::int64_t sample = 0; sample < 4; ++sample) even.push_back(sample_of(sample, 40));
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

TEST_F(Zero, Bf16MomentsHaveTheSameBitsInStages0And1) {
  const Mesh& mesh = mesh_of(shape);
  SmallOptions narrow = stage(0);
  narrow.bf16_moments = true;
  SmallTraining full(mesh, stage(0)), zero0(mesh, narrow);
  narrow.zero = 1;
  narrow.bucket_bytes = 1 << 14;  // more layers a bucket: elements keep their numbers
  SmallTraining zero1(mesh, narrow);
  for (SmallTraining* t : {&zero0, &zero1})
    for (const Tensor& moment : {t->optimizer.state().moment1, t->optimizer.state().moment2})
      ASSERT_EQ(moment.dtype(), DType::bf16);
  for (std::int64_t step = 1; step <= 3; ++step) {
    for (SmallTraining* t : {&full, &zero0, &zero1}) {
      t->gradients(samples);
      t->norm = 0.5;  // buckets of another size sum it in another order
      t->update(3e-3, step);
    }
    EXPECT_TRUE(same_values(zero0.parameters, zero1.parameters)) << "step " << step;
    EXPECT_LT(
        relative_error(elements(zero0.parameters.values()), elements(full.parameters.values())),
        2e-3)
        << "step " << step;
  }
  EXPECT_FALSE(same_values(zero0.parameters, full.parameters));
}

TEST_F(Zero, Bf16GradientsHaveTheSameBitsInStages0And1) {
  const Mesh& mesh = mesh_of(shape);
  const auto rounds = [&](int zero) {
    SmallOptions options = stage(zero);
    options.bf16_gradients = true;
    return options;
  };
  SmallTraining full(mesh, stage(0)), zero0(mesh, rounds(0)), zero1(mesh, rounds(1)),
      zero2(mesh, rounds(2));
  for (std::int64_t step = 1; step <= 3; ++step) {
    for (SmallTraining* t : {&full, &zero0, &zero1, &zero2}) t->gradients(samples);
    if (step == 1) {
      EXPECT_EQ(zero0.optimizer.shard_gradient(0).dtype(), DType::bf16);
      EXPECT_EQ(zero2.optimizer.shard_gradient(0).dtype(), DType::f32) << "a sum over rounds";
      for (const Parameter& p : full.parameters.table()) {
        const std::vector<double> exact = elements(full.optimizer.full_gradient(p.name));
        for (SmallTraining* t : {&zero0, &zero1, &zero2}) {
          const Tensor found = t->optimizer.full_gradient(p.name);
          ASSERT_EQ(found.dtype(), DType::f32);
          EXPECT_LT(relative_error(elements(found), exact), 6e-3) << p.name;
        }
        EXPECT_TRUE(bit_equal(zero0.optimizer.full_gradient(p.name),
                              zero1.optimizer.full_gradient(p.name)));
      }
    }
    EXPECT_EQ(zero1.norm, zero0.norm);
    EXPECT_NEAR(zero0.norm, full.norm, 6e-3 * full.norm);
    for (SmallTraining* t : {&full, &zero0, &zero1, &zero2}) t->update(3e-3, step);
    EXPECT_TRUE(bit_equal(zero0.parameters.values(), zero1.parameters.values())) << "step " << step;
    EXPECT_LT(
        relative_error(elements(zero0.parameters.values()), elements(full.parameters.values())),
        2e-2)
        << "step " << step;
  }
  EXPECT_FALSE(same_values(zero0.parameters, full.parameters));
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

TEST_F(Zero, SlicesTileEveryBucketAndMarkDecay) {
  const Mesh& mesh = mesh_of(shape);
  for (int z : {0, 1, 2}) {
    SmallTraining training(mesh, stage(z));
    const auto& optimizer = training.optimizer;
    const auto& buckets = training.parameters.buckets();
    ASSERT_EQ(optimizer.slices().size(), buckets.size());
    ASSERT_GT(buckets.size(), 2u);
    std::int64_t before = 0;
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      const auto& slice = optimizer.slices()[b];
      EXPECT_EQ(slice.size(), z == 0 ? buckets[b].size() : buckets[b].size() / world.size());
      EXPECT_EQ(slice.begin, buckets[b].begin + (z == 0 ? 0 : slice.size() * world.rank()));
      EXPECT_EQ(slice.at, before);
      before += slice.size();
      const Tensor& ranges = optimizer.decay(b);
      std::vector<int> decay(static_cast<std::size_t>(slice.size()));
      for (std::int64_t r = 0; r < ranges.numel(); r += 2)
        for (std::int64_t i = ranges.data<std::int64_t>()[r];
             i < ranges.data<std::int64_t>()[r + 1]; ++i)
          ++decay.at(static_cast<std::size_t>(i));
      for (const Parameter& p : training.parameters.table()) {
        const std::int64_t first = training.parameters.offset(p.name);
        for (std::int64_t i = std::max(first, slice.begin);
             i < std::min(first + p.numel(), slice.end); ++i)
          ASSERT_EQ(decay[static_cast<std::size_t>(i - slice.begin)], p.weight_decay ? 1 : 0)
              << p.name;
      }
    }
    EXPECT_EQ(optimizer.shard_size(), before);
  }
}

TEST_F(Zero, RunsCoverTheParametersOnce) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining training(mesh, stage(1, DType::f64));
  // What a rank's runs say of an element, at its place, is what the table says of it.
  std::vector<double> seen(static_cast<std::size_t>(training.parameters.numel()));
  const Tensor& master = training.optimizer.state().master;
  for (const ShardRun& run : training.optimizer.runs())
    for (std::int64_t i = run.begin; i < run.end; ++i)
      seen[static_cast<std::size_t>(i)] = master.data<double>()[run.at + i - run.begin];
  world.all_reduce(std::span<double>(seen));
  std::size_t i = 0;
  for (const Parameter& p : training.parameters.table())
    for (const double value : elements(training.parameters.value(p.name)))
      ASSERT_EQ(seen[i++], value) << p.name;
}

TEST_F(Zero, BucketsChangeNoGradient) {
  const Mesh& mesh = mesh_of(shape);
  SmallOptions one = stage(1), cut = stage(1);
  one.bucket_bytes = kOneBucket;
  SmallTraining whole(mesh, one), parts(mesh, cut);
  EXPECT_EQ(whole.parameters.buckets().size(), 1u);
  for (std::int64_t step = 1; step <= 2; ++step) {
    EXPECT_EQ(parts.gradients(samples), whole.gradients(samples));
    for (const Parameter& p : whole.parameters.table())
      EXPECT_TRUE(
          bit_equal(parts.optimizer.full_gradient(p.name), whole.optimizer.full_gradient(p.name)))
          << p.name;
    EXPECT_NEAR(parts.norm, whole.norm, 1e-12 * whole.norm);
    // The same clipping: norms differ by rounding alone.
    parts.norm = whole.norm;
    for (SmallTraining* t : {&whole, &parts}) t->update(3e-3, step);
  }
}

TEST_F(Zero, NoBufferOfAllGradientsInStage2) {
  const Mesh& mesh = mesh_of(shape);
  SmallOptions options = stage(2);
  SmallTraining training(mesh, options);
  const auto category = static_cast<std::size_t>(MemoryCategory::gradients);
  EXPECT_FALSE(training.parameters.gradients().defined());
  const std::int64_t before = memory_use().current[category];
  reset_peak_memory();
  training.gradients(samples);
  EXPECT_EQ(memory_use().current[category], before) << "no bucket outlives its reduction";
  std::int64_t largest = 0, all = 0;
  for (const StoredBucket& bucket : training.parameters.buckets()) {
    largest = std::max(largest, bucket.size() * 4);
    all += bucket.size() * 4;
  }
  ASSERT_LT(2 * largest, all);
  const std::int64_t peak = memory_use().peak[category] - before;
  EXPECT_GE(peak, largest);
  EXPECT_LE(peak, 2 * largest);
}

TEST_F(Zero, WhereBucketsAreReducedChangesNoBit) {
  const Mesh& mesh = mesh_of(shape);
  for (int z : {0, 1, 2})
    for (const auto& list : {samples, even}) {
      SmallOptions inside = stage(z), after = stage(z);
      after.overlap = false;
      SmallTraining a(mesh, inside), b(mesh, after);
      EXPECT_EQ(a.gradients(list), b.gradients(list));
      EXPECT_EQ(a.norm, b.norm);
      for (const Parameter& p : a.parameters.table())
        EXPECT_TRUE(bit_equal(a.optimizer.full_gradient(p.name), b.optimizer.full_gradient(p.name)))
            << p.name << ", zero " << z;
    }
}

/// Buckets of a step that this rank reduced inside its last backward, and those that it has; none
/// of either without a backward.
std::pair<std::int64_t, std::int64_t> reduced_inside(const Mesh& mesh, SmallOptions options,
                                                     const std::vector<SampleLength>& list) {
  Recorder recorder;
  options.recorder = &recorder;
  SmallTraining training(mesh, options);
  training.gradients(list);
  double begin_s = 0, end_s = 0;
  std::vector<double> reductions;
  std::size_t backwards = 0;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events) {
      if (e.kind == EventKind::backward) begin_s = e.begin_s, end_s = e.end_s, ++backwards;
      if (e.kind == EventKind::gradient_reduce) reductions.push_back(e.begin_s);
    }
  });
  if (backwards == 0) return {};
  return {std::count_if(reductions.begin(), reductions.end(),
                        [&](double t) { return begin_s < t && t < end_s; }),
          std::ssize(training.parameters.buckets())};
}

// From the first layer on that the last backward has passed, not when it is over, where ranks are
// in step, and under ZeRO 2 anyway.
TEST_F(Zero, ReductionsBeginInsideTheLastBackward) {
  const Mesh& mesh = mesh_of(shape);
  for (int z : {0, 1, 2}) {
    auto [inside, buckets] = reduced_inside(mesh, stage(z), even);
    EXPECT_GE(inside, buckets) << "zero " << z;
    std::tie(inside, buckets) = reduced_inside(mesh, stage(z), samples);
    if (z == 2 || shape.dp == 1)
      EXPECT_GE(inside, buckets) << "zero " << z;
    else
      EXPECT_EQ(inside, 0) << "ranks that are not in step wait where they hold no one up";
  }
}

TEST_F(Zero, ValuesArriveBeforeTheyAreRead) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining one(mesh, stage(0)), many(mesh, stage(1));
  for (std::int64_t step = 1; step <= 2; ++step) {
    // The second step's forward begins while the first one's values are on their way.
    EXPECT_EQ(one.gradients(samples), many.gradients(samples));
    for (SmallTraining* t : {&one, &many}) t->update(3e-3, step);
  }
  for (const Parameter& p : one.parameters.table())
    EXPECT_TRUE(bit_equal(one.parameters.value(p.name), many.parameters.value(p.name))) << p.name;
}

TEST_F(Zero, MasterAndValuesFollowEachOther) {
  const Mesh& mesh = mesh_of(shape);
  SmallTraining training(mesh, stage(1));
  auto& state = training.optimizer.state();
  for (const auto& slice : training.optimizer.slices())
    for (std::int64_t i = slice.begin; i < slice.end; ++i)
      state.master.data<float>()[slice.at + i - slice.begin] = static_cast<float>(i);
  training.optimizer.values_from_master();
  const float* values = training.parameters.values().data<float>();
  for (std::int64_t i = 0; i < training.parameters.values().numel(); ++i)
    ASSERT_EQ(values[i], static_cast<float>(i));
}

/// The host with a queue of updates, which notes who waits for them.
class Updates final : public HostStandIn {
 public:
  std::string description() const override { return "host with a queue of updates"; }
  void zero(void* pointer, std::size_t bytes) override {
    waited_at_zero = std::min(waited_at_zero, waited.size());
    HostStandIn::zero(pointer, bytes);
  }
  Fence fence(Queue queue) override {
    if (queue != Queue::update) return {};
    return {queue, made++};
  }
  void wait(Fence fence, Queue later) override {
    if (later == Queue::update && on_order) on_order();
    if (later == Queue::compute && !fence.empty()) waited.push_back(fence.number);
  }
  std::int64_t made = 0;             ///< updates
  std::vector<std::int64_t> waited;  ///< numbers of updates that computation waits for
  std::size_t waited_at_zero = 0;    ///< how many when memory was zeroed, the fewest
  std::function<void()> on_order;    ///< the queue of updates is ordered behind computation
};

TEST_F(Zero, ForwardsWaitForTheUpdatesOfTheirLayers) {
  static Updates device;  // memory that it gave goes back at the end
  const Mesh& mesh = mesh_of(shape);
  for (const int z : {0, 1, 2}) {
    set_host_device(&device);
    {
      SmallTraining training(mesh, stage(z));
      const auto& buckets = training.parameters.buckets();
      std::size_t first = 0;  // that layer 0 does not need
      while (first < buckets.size() && buckets[first].final_at <= 0) ++first;
      ASSERT_GT(first, 0u);
      ASSERT_GT(buckets.size(), first + 1);
      const bool shared = z > 0 && world.size() > 1;
      if (shared) first = buckets.size();  // gathers follow, behind computation
      const auto beside = static_cast<std::int64_t>(buckets.size() - first);
      training.gradients(samples);
      device.made = 0, device.waited.clear();
      const auto& master = training.optimizer.state().master;
      std::int64_t ordered = 0;
      std::vector<double> before;  // of the first bucket beside
      const auto beside_values = [&] {
        const auto& slices = training.optimizer.slices();
        return elements(master.rows(slices[first].at, slices[first].at + slices[first].size()));
      };
      device.on_order = [&] {
        ++ordered;
        EXPECT_EQ(beside_values(), before) << "updates follow the norm";
      };
      const double enough = ShardedOptimizer::kTokensBeside;
      training.optimizer.apply(1, 1e-3, 1, enough - 1);
      EXPECT_EQ(device.made, 0) << "a short forward would wait for a slow update";
      if (!shared) before = beside_values();
      training.optimizer.apply(1, 1e-3, 2, enough);
      EXPECT_EQ(device.made, beside);
      EXPECT_EQ(ordered, shared ? 0 : 1);
      if (!shared) EXPECT_NE(beside_values(), before);
      device.on_order = {};
      EXPECT_TRUE(device.waited.empty());
      for (const std::int64_t layer : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}}) {
        training.parameters.need_values(layer);
        std::vector<std::int64_t> expected;
        for (std::size_t b = first; b < buckets.size() && buckets[b].final_at <= layer; ++b)
          expected.push_back(static_cast<std::int64_t>(b - first));
        EXPECT_EQ(device.waited, expected) << "layer " << layer;
      }
      training.optimizer.state();
      EXPECT_EQ(std::ssize(device.waited), beside) << "checkpoints read what is updated";
      // A rank without a forward: the next reduction writes what the update reads.
      training.optimizer.apply(1, 1e-3, 3, enough);
      device.waited.clear();
      training.optimizer.begin_step();
      device.waited_at_zero = buckets.size();
      training.optimizer.end_round();
      training.optimizer.reduce_gradients();
      EXPECT_EQ(std::ssize(device.waited), beside);
      EXPECT_GE(static_cast<std::int64_t>(device.waited_at_zero), beside)
          << "what no forward reached is zeroed";
      training.optimizer.apply(1, 1e-3, 4, enough);
      device.waited.clear();
    }
    if (z == 0 || world.size() == 1) {
      EXPECT_EQ(device.waited.size(), 1u) << "memory goes back behind the last update";
    }
    set_host_device(nullptr);
  }
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
  EXPECT_EQ(optimizers, std::ssize(training.parameters.buckets()));
  if (others > 0) {
    EXPECT_GT(reduced, 0);
    EXPECT_EQ(reduced % others, 0);
  }
}

// Every rank sends and gets its part of the others once (reduce-scatter), or twice (all-reduce).
TEST_F(Zero, AReductionCountsWhatItMoves) {
  for (const int zero : {0, 1}) {
    Recorder recorder;
    SmallOptions options = stage(zero);
    options.recorder = &recorder;
    SmallTraining training(mesh_of(shape), options);
    training.gradients(samples);
    std::int64_t reduced = 0;
    recorder.flush([&](std::span<const Event> events) {
      for (const Event& e : events)
        if (e.kind == EventKind::gradient_reduce) reduced += e.bytes;
    });
    const std::int64_t bytes = training.parameters.values().numel() * 4;
    EXPECT_EQ(reduced, (zero == 0 ? 2 : 1) * bytes / world.size() * (world.size() - 1));
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
