// Pipelines: loss, norm and every gradient on dp x pp x cp are those of one rank, under every
// schedule and for any mix of lengths; the ops recorded are the plan's, one by one.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/model/tensor_specs.hpp"
#include "tests/parallel/small_training.hpp"

namespace ballast {
namespace {

using namespace testing;

ModelShape deep_shape(bool tied) {
  ModelShape shape = small_shape();
  shape.layers = 5;
  shape.tied_embedding = tied;
  return shape;
}

/// Every dp x pp x cp_outer x cp_inner with pp > 1 and at most 4 that fills `ranks`.
std::vector<MeshShape> pipeline_meshes(int ranks) {
  std::vector<MeshShape> list;
  for (int pp = 2; pp <= std::min(ranks, 4); ++pp) {
    if (ranks % pp != 0) continue;
    for (MeshShape shape : data_and_context_meshes(ranks / pp)) {
      shape.pp = pp;
      list.push_back(shape);
    }
  }
  return list;
}

class Pipeline : public ::testing::Test {
 protected:
  const int ranks = Communicator::world().size();
  const std::string trace = fmt::format("repeat with BALLAST_TEST_SEED={}", test_seed());
  std::vector<SampleLength> samples;
  void SetUp() override {
    if (ranks == 1) GTEST_SKIP() << "needs stages";
    for (std::int64_t tokens : {71, 23, 1, 0, 13, 37, 1, 9})
      samples.push_back(sample_of(static_cast<std::int64_t>(samples.size()), tokens));
  }
  void expect_like_one_rank(const MeshShape& shape, const SmallOptions& options,
                            const Reference& reference) {
    SCOPED_TRACE(fmt::format("{}, {}, zero {}, {}{}", describe(shape), options.pipeline.schedule,
                             options.zero, name(options.type),
                             options.shape.tied_embedding ? ", tied" : ""));
    const Mesh& mesh = mesh_of(shape);
    SmallTraining training(mesh, options);
    const double loss = training.gradients(samples);
    const double tolerance = options.type == DType::f64 ? 1e-10 : 1e-5;
    EXPECT_NEAR(loss, reference.loss, tolerance * reference.loss);
    EXPECT_NEAR(training.norm, reference.norm, tolerance * reference.norm);
    const auto [error, where] = worst_gradient(training, mesh.world, reference);
    EXPECT_LT(error, tolerance) << where;
  }
};

TEST_F(Pipeline, Bf16GradientsFollowOneRank) {
  SCOPED_TRACE(trace);
  const Reference reference = reference_step(samples, DType::f64, deep_shape(true));
  for (const MeshShape& shape : pipeline_meshes(ranks))
    for (const int zero : {0, 1, 2}) {
      SmallOptions options;
      options.shape = deep_shape(true);
      options.zero = zero;
      options.bf16_gradients = true;
      const Mesh& mesh = mesh_of(shape);
      SmallTraining training(mesh, options);
      training.gradients(samples);
      const auto [error, where] = worst_gradient(training, mesh.world, reference);
      EXPECT_LT(error, 1.5e-2) << where << ", " << describe(shape) << ", zero " << zero;
      EXPECT_GT(error, 1e-4) << "rounding";
    }
}

TEST_F(Pipeline, EveryMeshAndScheduleEqualsOneRank) {
  SCOPED_TRACE(trace);
  int turn = 0;
  for (const bool tied : {false, true}) {
    const Reference reference = reference_step(samples, DType::f64, deep_shape(tied));
    for (const MeshShape& shape : pipeline_meshes(ranks))
      for (ScheduleKind schedule : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                                    ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble}) {
        if (ranks > 4 && turn++ % 4 != 0) continue;  // more ranks than cores are slow
        SmallOptions options;
        options.shape = deep_shape(tied);
        options.pipeline.schedule = schedule;
        options.zero = turn++ % 3;
        options.recompute.mode = turn % 2 == 0 ? Recompute::full : Recompute::none;
        expect_like_one_rank(shape, options, reference);
      }
  }
}

TEST_F(Pipeline, SinglePrecisionAndOneMicroBatch) {
  SCOPED_TRACE(trace);
  samples.resize(1);
  const Reference reference = reference_step(samples, DType::f32, deep_shape(true));
  for (const MeshShape& shape : pipeline_meshes(ranks)) {
    SmallOptions options;
    options.shape = deep_shape(true);
    options.type = DType::f32;
    options.zero = 1;
    expect_like_one_rank(shape, options, reference);
  }
}

TEST_F(Pipeline, TiedCopiesStayEqualOverUpdates) {
  SCOPED_TRACE(trace);
  for (const int zero : {0, 1, 2}) {
    MeshShape shape;
    shape.pp = 2;
    shape.dp = ranks / 2;
    const Mesh& mesh = mesh_of(shape);
    SmallOptions options;
    options.shape = deep_shape(true);
    options.type = DType::f32;
    options.zero = zero;
    SmallTraining training(mesh, options);
    double first = 0, loss = 0;
    for (std::int64_t step = 1; step <= 3; ++step) {
      loss = training.gradients(samples);
      if (step == 1) first = loss;
      training.update(1e-2, step);
    }
    EXPECT_LT(loss, first);
    const Tensor mine = training.parameters.value("model.embed_tokens.weight").clone();
    Tensor other = mine.clone();
    mesh.pp.broadcast(other, 0);
    EXPECT_TRUE(bit_equal(mine, other)) << "zero " << zero;
  }
}

TEST_F(Pipeline, HalvesOfBackwardEqualItBitForBitAndHoldWhatIsPredicted) {
  SCOPED_TRACE(trace);
  samples.clear();
  for (std::int64_t s = 0; s < 2 * ranks; ++s) samples.push_back(sample_of(s, 40));
  MeshShape shape;
  shape.pp = std::min(ranks, 4);
  shape.cp_inner = ranks / shape.pp;
  const Mesh& mesh = mesh_of(shape);
  SmallOptions options;
  options.shape = deep_shape(true);
  options.method = Batching::none;
  options.pipeline.search = 1;  // the order of 1f1b, so that sums run in the same order
  options.pipeline.costs.backward_over_forward = 2;
  SmallTraining whole(mesh, options);
  const double loss = whole.gradients(samples);
  options.pipeline.schedule = ScheduleKind::zero_bubble;
  SmallTraining halves(mesh, options);
  reset_peak_memory();
  const std::int64_t before = memory_use().current[static_cast<int>(MemoryCategory::activations)];
  EXPECT_EQ(halves.gradients(samples), loss);
  EXPECT_EQ(halves.norm, whole.norm);
  EXPECT_TRUE(bit_equal(halves.parameters.gradients(), whole.parameters.gradients()));
  const auto stage = static_cast<std::size_t>(mesh.at.pp);
  const std::vector<Op>& ops = halves.schedule.stages.at(stage);
  const auto weights = std::count_if(
      ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::backward_weight; });
  EXPECT_TRUE(mesh.at.pp == 0 || weights > 0);
  // Between forward and the end of backward, predicted and held: activations, and beside them a
  // layer's gradients before its activations go, the stage input and a message.
  const SimulatedSchedule predicted =
      simulate(halves.schedule, {[](int, const Op&) { return 1.0; }});
  const std::vector<std::int64_t> begin = halves.step_plan(halves.plan(samples)).layer_begin;
  const std::int64_t tokens = 40 / mesh.cp.size(), row = tokens * options.shape.hidden * 8,
                     layers = (stage + 1 < begin.size() ? begin[stage + 1] : options.shape.layers) -
                              begin[stage];
  const std::int64_t held = predicted.peak_live_activations.at(stage) *
                            (tokens * options.shape.head_dim * 8 +  // rotary table
                             layers * kept_bytes(options.shape, tokens, DType::f64, Keep::all) +
                             (halves.model.last() ? row : 0));
  const std::int64_t measured =
      memory_use().peak[static_cast<int>(MemoryCategory::activations)] - before;
  EXPECT_LE(measured, held + between_halves_bytes(options.shape, tokens, DType::f64) + 3 * row);
  EXPECT_GE(measured, held - 3 * predicted.peak_live_activations.at(stage) * row)
      << "the bound is loose";
}

TEST_F(Pipeline, RecordedOpsAreThePlans) {
  SCOPED_TRACE(trace);
  for (ScheduleKind schedule : {ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                                ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble}) {
    MeshShape shape;
    shape.pp = std::min(ranks, 4);
    shape.dp = ranks / shape.pp;
    Recorder recorder;
    SmallOptions options;
    options.shape = deep_shape(false);
    options.pipeline.schedule = schedule;
    options.recorder = &recorder;
    SmallTraining training(mesh_of(shape), options);
    training.gradients(samples);
    std::vector<std::tuple<EventKind, int, int>> done, planned;
    std::int64_t sent = 0, received = 0;
    recorder.flush([&](std::span<const Event> events) {
      for (const Event& e : events) {
        if (e.kind <= EventKind::fetch) done.emplace_back(e.kind, e.micro_batch, e.chunk);
        if (e.kind == EventKind::send) sent += e.bytes;
        if (e.kind == EventKind::recv) received += e.bytes;
      }
    });
    const Communicator world = Communicator::world();
    sent = world.all_reduce(sent, Reduction::sum);
    EXPECT_EQ(world.all_reduce(received, Reduction::sum), sent);
    EXPECT_EQ(sent > 0, shape.pp > 1);
    for (const Op& op : training.schedule.stages.at(mesh_of(shape).at.pp))
      planned.emplace_back(event_kind(op.kind), op.micro_batch, op.chunk);
    EXPECT_FALSE(planned.empty());
    EXPECT_TRUE(done == planned) << schedule;
  }
}

TEST_F(Pipeline, RandomMixesRunThroughEverySchedule) {
  SCOPED_TRACE(trace);
  const char* all = std::getenv("BALLAST_TEST_FULL");
  const int mixes = all != nullptr ? 50 : 3;
  SharedDraw draws(77);
  const std::vector<MeshShape> meshes = pipeline_meshes(ranks);
  ScheduleKind schedules[] = {ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                              ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble};
  for (int mix = 0; mix < mixes; ++mix) {
    samples.clear();
    const std::int64_t count = draws.integer(1, 12);
    for (std::int64_t s = 0; s < count; ++s)
      samples.push_back(
          sample_of(s, draws.integer(0, 9) == 0 ? draws.integer(60, 150) : draws.integer(0, 30)));
    const Reference reference = reference_step(samples, DType::f64, deep_shape(mix % 2 == 0));
    for (int turn = 0; turn < (all != nullptr ? 4 : 1); ++turn) {
      SmallOptions options;
      options.shape = deep_shape(mix % 2 == 0);
      options.pipeline.schedule = schedules[(mix + turn) % 4];
      options.micro_batch_tokens = draws.integer(8, 64);
      options.zero = static_cast<int>(draws.integer(0, 2));
      expect_like_one_rank(meshes[static_cast<std::size_t>(
                               draws.integer(0, static_cast<std::int64_t>(meshes.size()) - 1))],
                           options, reference);
    }
  }
}

TEST_F(Pipeline, ALayerThatIsNotFiniteIsFoundOnAnyStage) {
  MeshShape shape;
  shape.pp = std::min(ranks, 4);
  shape.cp_inner = ranks / shape.pp;
  const Mesh& mesh = mesh_of(shape);
  SmallOptions options;
  options.shape = deep_shape(false);
  for (const int layer : {-1, 0, 2, 4}) {
    SmallTraining training(mesh, options);
    const std::string name = fmt::format("model.layers.{}.mlp.down_proj.weight", layer);
    if (training.parameters.contains(name)) training.parameters.value(name).data<double>()[3] = NAN;
    EXPECT_EQ(training.first_nonfinite_layer({{{0, 0, 40, 0}}}), layer);
  }
}

TEST_F(Pipeline, MistakesAreErrors) {
  MeshShape shape;
  shape.pp = ranks;
  const PipelineLinks links(mesh_of(shape).pp, host_device());
  const Tensor tensor = Tensor::zeros({2}, DType::f64);
  EXPECT_THROW(links.send(tensor, links.stage(), Payload::activation), Error);
  EXPECT_THROW(links.send(tensor, links.stage() - 1, Payload::activation), Error);
  EXPECT_THROW(links.receive(tensor, links.stage() + 1, Payload::activation), Error);
  SmallOptions options;
  SmallTraining training(mesh_of({ranks, 1, 1, 1, 1, 1, 0}), options);
  EXPECT_THROW(run_stage(gpipe_schedule({{0}}, ranks + 1), 1, training.model, links, {}, nullptr),
               Error);
}

}  // namespace
}  // namespace ballast
