// Invariants 1 to 3 over dp x cp: loss and every gradient are those of one rank that trains each
// sample alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <set>

#include "tests/parallel/small_training.hpp"

namespace ballast {
namespace {

using namespace testing;

struct LayoutCase {
  LayoutKind kind;
  std::int64_t stripe;
};
const LayoutCase kLayouts[] = {{LayoutKind::contiguous, 1}, {LayoutKind::zigzag, 1},
                               {LayoutKind::striped, 1},    {LayoutKind::shuffled, 3},
                               {LayoutKind::striped, 64},   {LayoutKind::document_zigzag, 1}};

/// Odd lengths, one-token and empty samples, one longer than a pack.
std::vector<SampleLength> awkward_samples() {
  std::vector<SampleLength> samples;
  for (std::int64_t tokens : {71, 23, 1, 0, 13, 37, 1, 9})
    samples.push_back(sample_of(static_cast<std::int64_t>(samples.size()), tokens));
  return samples;
}

void expect_like_one_rank(const MeshShape& shape, const SmallOptions& options,
                          const std::vector<SampleLength>& samples, const Reference& reference) {
  SCOPED_TRACE(fmt::format("{}, {} {}, zero {}, {}", describe(shape), name(options.layout),
                           options.stripe, options.zero, name(options.type)));
  const Mesh& mesh = mesh_of(shape);
  SmallTraining training(mesh, options);
  const double loss = training.gradients(samples);
  const double tolerance = options.type == DType::f64 ? 1e-10 : 1e-5;
  EXPECT_NEAR(loss, reference.loss, tolerance * reference.loss);
  EXPECT_NEAR(training.norm, reference.norm, tolerance * reference.norm);
  const auto [error, where] = worst_gradient(training, mesh.world, reference);
  EXPECT_LT(error, tolerance) << where;
}

class Training : public ::testing::Test {
 protected:
  const int ranks = Communicator::world().size();
  const std::vector<SampleLength> samples = awkward_samples();
  const std::string trace = fmt::format("repeat with BALLAST_TEST_SEED={}", test_seed());
};

TEST_F(Training, EveryMeshAndLayoutEqualsOneRankInFp64) {
  SCOPED_TRACE(trace);
  const Reference reference = reference_step(samples, DType::f64);
  int zero = 0;
  for (const MeshShape& shape : data_and_context_meshes(ranks))
    for (const LayoutCase& l : kLayouts) {
      if (shape.cp() == 1 && l.kind != LayoutKind::contiguous)
        continue;  // one rank holds all: layouts do not differ
      SmallOptions options;
      options.layout = l.kind;
      options.stripe = l.stripe;
      options.zero = zero++ % 3;
      expect_like_one_rank(shape, options, samples, reference);
    }
}

TEST_F(Training, EveryMeshEqualsOneRankInFp32) {
  SCOPED_TRACE(trace);
  const Reference reference = reference_step(samples, DType::f32);
  int zero = 0;
  for (const MeshShape& shape : data_and_context_meshes(ranks)) {
    SmallOptions options;
    options.type = DType::f32;
    options.zero = zero++ % 3;
    expect_like_one_rank(shape, options, samples, reference);
  }
}

TEST_F(Training, SequenceParallelismAloneAndRoundRingsEqualsOneRank) {
  SCOPED_TRACE(trace);
  for (const DType type : {DType::f64, DType::f32}) {
    const Reference reference = reference_step(samples, type);
    int zero = 0;
    for (const MeshShape& shape : sequence_meshes(ranks, small_shape().query_heads)) {
      SmallOptions options;
      options.type = type;
      options.layout = zero % 2 ? LayoutKind::striped : LayoutKind::zigzag;
      options.stripe = 3;
      options.zero = zero++ % 3;
      expect_like_one_rank(shape, options, samples, reference);
    }
  }
}

/// Samples of the lengths, numbered from `first` on.
std::vector<SampleLength> samples_from(std::int64_t first,
                                       const std::vector<std::int64_t>& lengths) {
  std::vector<SampleLength> list;
  for (const std::int64_t tokens : lengths) list.push_back(sample_of(first++, tokens));
  return list;
}

TEST_F(Training, DegreesThatChangeEveryStepEqualOneRank) {
  SCOPED_TRACE(trace);
  // Short packs alone, long ones alone, both, and too few to occupy all ranks: each step has other
  // degrees than the one before.
  const std::vector<std::vector<SampleLength>> steps{
      samples_from(0, {9, 15, 3, 16, 1, 0, 12, 7}), samples_from(10, {61, 40, 90}),
      samples_from(20, {5, 90, 13, 33, 30, 2, 21, 1}), samples_from(30, {4, 35})};
  for (MeshShape shape : data_and_context_meshes(ranks)) {
    if (shape.cp_outer > 1 || shape.dp < 2) continue;
    SmallOptions options;
    options.method = Batching::hbp;
    const int most = shape.dp;  // a ring of those that the 4 query heads leave
    int some = 2;
    while (most % some != 0) ++some;
    options.groups = {{16, 1, 1}, {40, some, 0}, {96, most, -1}};
    for (int zero : {0, 1, 2}) {
      options.zero = zero;
      options.recompute.mode = zero == 1 ? Recompute::selective : Recompute::none;
      SCOPED_TRACE(fmt::format("{}, zero {}", describe(shape), zero));
      const Mesh& mesh = mesh_of(shape, {some, most}, small_shape().query_heads);
      SmallTraining training(mesh, options);
      SmallOptions plain;
      plain.method = Batching::none;
      SmallTraining reference(alone(), plain);
      std::set<int> degrees;
      for (std::size_t step = 0; step < steps.size(); ++step) {
        SCOPED_TRACE(fmt::format("step {}", step));
        for (const auto& list : training.plan(steps[step]).micro_batches)
          for (const MicroBatch& m : list) degrees.insert(m.sp);
        const Reference expected = reference_step(reference, steps[step]);
        EXPECT_NEAR(training.gradients(steps[step]), expected.loss, 1e-10 * expected.loss);
        EXPECT_NEAR(training.norm, expected.norm, 1e-10 * expected.norm);
        const auto [error, where] = worst_gradient(training, mesh.replica, expected);
        EXPECT_LT(error, 1e-9) << where;
        training.update(1e-3, static_cast<std::int64_t>(step) + 1);
        reference.update(1e-3, static_cast<std::int64_t>(step) + 1);
      }
      EXPECT_EQ(degrees, (std::set<int>{1, some, most}));
    }
  }
}

/// Attention counts more than in a real model, so that lengths far apart need different groups.
struct QuadraticCosts final : PlacementCosts {
  double rest_s(std::int64_t tokens, const PlacementSplit& s) const override {
    return static_cast<double>(tokens) / (s.sp * s.ring);
  }
  double attention_s(std::int64_t q, std::int64_t p, const PlacementSplit& s) const override {
    const double n = static_cast<double>(q);
    return 0.05 * n * (static_cast<double>(p) + n / 2) / (s.sp * s.ring);
  }
  double transfer_s(std::int64_t tokens, double, const PlacementSplit& s) const override {
    return s.ranks > 1 ? 0.1 * static_cast<double>(tokens) / s.ranks : 0;
  }
  double bytes(std::int64_t tokens, std::int64_t, const PlacementSplit& s) const override {
    return static_cast<double>((tokens + s.ranks - 1) / s.ranks);
  }
};

TEST_F(Training, RandomMixesOfDegreesSideBySideEqualOneRank) {
  SCOPED_TRACE(trace);
  SmallOptions plain;
  plain.method = Batching::none;
  int draw = 0;
  std::set<int> degrees;
  bool chunked = false;
  const auto random = [&](int below) {
    return static_cast<std::int64_t>(random_bits(test_seed(), 77, draw++) %
                                     static_cast<std::uint64_t>(below));
  };
  std::vector<MeshShape> shapes = data_and_context_meshes(ranks);
  if (ranks % 2 == 0) {
    MeshShape stages;
    stages.pp = 2, stages.dp = ranks / 2;
    shapes.push_back(stages);
  }
  for (const MeshShape& shape : shapes)
    for (int round = 0; round < 3; ++round) {
      SmallOptions options;
      options.method = Batching::balanced;
      options.placement_costs = std::make_shared<QuadraticCosts>();
      options.micro_batch_tokens = 24 + random(40);
      options.splits.clear();
      std::vector<int> joined;
      for (int r = 1; r <= shape.dp; ++r)
        if (shape.dp % r == 0) {
          const ContextSplit split = joined_split(shape, r, small_shape().query_heads);
          options.splits.push_back({r, split.sp, split.ring()});
          if (r > 1) joined.push_back(r);
        }
      options.zero = static_cast<int>(random(3));
      options.layout = random(2) == 0 ? LayoutKind::automatic : LayoutKind::zigzag;
      options.pipeline.k = 1 + static_cast<int>(random(2));
      constexpr std::array kSchedules{ScheduleKind::gpipe, ScheduleKind::one_f_one_b,
                                      ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble};
      options.pipeline.schedule = kSchedules[static_cast<std::size_t>(random(4))];
      if (random(2) == 0) options.recompute.mode = Recompute::full;
      if (random(3) == 0) options.attention.pattern = PatternKind::moba;
      options.attention.moba_block = 64, options.attention.moba_top_k = 2;
      plain.attention = options.attention;
      std::vector<std::int64_t> lengths{random(400), random(120), random(120)};
      for (std::int64_t i = random(12); i >= 0; --i) lengths.push_back(random(30));
      const auto step = samples_from(1000 * round, lengths);
      SCOPED_TRACE(fmt::format("{}, {}, zero {}, k {}, packs of {}, {}, lengths {}",
                               describe(shape), name(options.pipeline.schedule), options.zero,
                               options.pipeline.k, options.micro_batch_tokens,
                               name(options.attention.pattern), fmt::join(lengths, " ")));
      const Mesh& mesh = mesh_of(shape, joined, small_shape().query_heads);
      SmallTraining training(mesh, options), reference(alone(), plain);
      for (const auto& list : training.plan(step).micro_batches)
        for (const MicroBatch& m : list) {
          degrees.insert(m.sp);
          for (const Segment& s : m.segments) chunked = chunked || s.begin > 0;
        }
      const Reference expected = reference_step(reference, step);
      EXPECT_NEAR(training.gradients(step), expected.loss, 1e-10 * expected.loss);
      EXPECT_NEAR(training.norm, expected.norm, 1e-10 * expected.norm);
      const auto [error, where] = worst_gradient(training, mesh.world, expected);
      EXPECT_LT(error, 1e-9) << where;
    }
  EXPECT_TRUE(chunked || ranks > 4);
  EXPECT_EQ(degrees.size() > 1, ranks > 1);
}

/// The objective of Equation 6 from gradients of single samples' mean losses: for each micro-batch
/// the mean over its samples, weighted by `weight(sample, micro-batch)`, then over micro-batches.
Reference combined(SmallTraining& single, const Batch& batch,
                   const std::function<double(const Segment&, const MicroBatch&)>& weight) {
  Reference sum;
  for (const auto& list : batch.micro_batches)
    for (const MicroBatch& m : list)
      for (const Segment& s : m.segments) {
        if (s.loss_tokens == 0) continue;
        const Reference one = reference_step(single, {{s.sample, s.end, s.loss_tokens}});
        const double w = weight(s, m);
        sum.loss += w * one.loss;
        sum.names = one.names;
        sum.gradients.resize(one.gradients.size());
        for (std::size_t p = 0; p < one.gradients.size(); ++p) {
          sum.gradients[p].resize(one.gradients[p].size());
          for (std::size_t i = 0; i < one.gradients[p].size(); ++i)
            sum.gradients[p][i] += w * one.gradients[p][i];
        }
      }
  return sum;
}

TEST_F(Training, LossNormalisersAreThoseOfEquation6AndThreeOfThemKeepTheSplitOut) {
  SCOPED_TRACE(trace);
  SmallOptions plain;
  plain.method = Batching::none;
  SmallTraining single(alone(), plain);
  std::vector<MeshShape> shapes = data_and_context_meshes(ranks);
  for (const MeshShape& shape : sequence_meshes(ranks, small_shape().query_heads))
    shapes.push_back(shape);
  if (shapes.size() > 6) shapes.resize(6);
  for (const LossNormaliser normaliser :
       {LossNormaliser::ave_token, LossNormaliser::sum, LossNormaliser::token_mean,
        LossNormaliser::sample_mean, LossNormaliser::sequence_mean}) {
    const Reference* first = nullptr;
    Reference kept;
    double apart = 0;  // how far the gradients of other splits are from those of the first
    for (const MeshShape& shape : shapes)
      for (const std::int64_t tokens : {48, 96, 400}) {
        SCOPED_TRACE(fmt::format("normaliser {}, {}, packs of {}", static_cast<int>(normaliser),
                                 describe(shape), tokens));
        SmallOptions options;
        options.normaliser = normaliser;
        options.micro_batch_tokens = tokens;
        const Mesh& mesh = mesh_of(shape);
        SmallTraining training(mesh, options);
        const Batch batch = training.plan(samples);
        double micro_batches = 0, all_carrying = 0;
        for (const auto& list : batch.micro_batches)
          for (const MicroBatch& m : list) {
            micro_batches += m.loss_tokens() > 0;
            for (const Segment& s : m.segments) all_carrying += s.loss_tokens > 0;
          }
        const Reference expected =
            combined(single, batch, [&](const Segment& s, const MicroBatch& m) {
              const double carrying = static_cast<double>(
                  std::count_if(m.segments.begin(), m.segments.end(),
                                [](const Segment& of) { return of.loss_tokens > 0; }));
              const double own = static_cast<double>(s.loss_tokens);
              switch (normaliser) {
                case LossNormaliser::ave_token:
                  return own / static_cast<double>(batch.loss_tokens());
                case LossNormaliser::sum:
                  return own;
                case LossNormaliser::token_mean:
                  return own / static_cast<double>(m.loss_tokens()) / micro_batches;
                case LossNormaliser::sample_mean:
                  return 1 / carrying / micro_batches;
                case LossNormaliser::sequence_mean:
                  return own > 0 ? 1 / all_carrying : 0.0;
              }
              return 0.0;
            });
        EXPECT_NEAR(training.gradients(samples), expected.loss, 1e-10 * expected.loss);
        const auto [error, where] = worst_gradient(training, mesh.world, expected);
        EXPECT_LT(error, 1e-10) << where;
        if (first) apart = std::max(apart, worst_gradient(training, mesh.world, *first).first);
        if (!first) {
          kept = expected;
          first = &kept;
        }
      }
    const bool exact =
        normaliser != LossNormaliser::token_mean && normaliser != LossNormaliser::sample_mean;
    if (exact)
      EXPECT_LT(apart, 1e-10) << "the same for every split";
    else
      EXPECT_GT(apart, 1e-2) << "depends on which samples share a micro-batch";
  }
}

TEST_F(Training, MoreRanksThanSamplesOrTokens) {
  SCOPED_TRACE(trace);
  const std::vector<SampleLength> few{sample_of(0, 5)};
  const Reference reference = reference_step(few, DType::f64);
  std::vector<MeshShape> shapes = data_and_context_meshes(ranks);
  for (const MeshShape& shape : sequence_meshes(ranks, small_shape().query_heads))
    shapes.push_back(shape);
  for (const MeshShape& shape : shapes) {
    SmallOptions options;
    options.zero = 2;
    expect_like_one_rank(shape, options, few, reference);
  }
}

TEST_F(Training, RecomputationChangesNoBitOnARing) {
  SCOPED_TRACE(trace);
  MeshShape shape;
  shape.cp_inner = ranks;
  const Mesh& mesh = mesh_of(shape);
  SmallOptions options;
  options.type = DType::f32;
  SmallTraining keep(mesh, options);
  const double loss = keep.gradients(samples);
  for (RecomputeOptions recompute :
       {RecomputeOptions{Recompute::selective, -1}, RecomputeOptions{Recompute::full, 1},
        RecomputeOptions{Recompute::full, -1}}) {
    options.recompute = recompute;
    SmallTraining again(mesh, options);
    EXPECT_EQ(again.gradients(samples), loss);
    EXPECT_TRUE(bit_equal(again.parameters.gradients(), keep.parameters.gradients()))
        << static_cast<int>(recompute.mode) << " " << recompute.layers;
  }
}

TEST_F(Training, RepeatsItsBits) {
  MeshShape shape;
  shape.dp = ranks > 1 ? 2 : 1;
  shape.cp_outer = ranks / shape.dp;
  SmallOptions options;
  options.type = DType::f32;
  options.zero = 1;
  SmallTraining first(mesh_of(shape), options), second(mesh_of(shape), options);
  for (std::int64_t step = 1; step <= 2; ++step) {
    EXPECT_EQ(first.gradients(samples), second.gradients(samples));
    first.update(1e-2, step);
    second.update(1e-2, step);
  }
  EXPECT_TRUE(bit_equal(first.parameters.values(), second.parameters.values()));
}

}  // namespace
}  // namespace ballast
