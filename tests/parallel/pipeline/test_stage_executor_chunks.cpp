// Dependent chunks (invariant 2): loss, norm and every gradient are those of whole samples, for any
// chunk size, K, schedule, mesh and place of the stored state; what is kept does not grow with the
// sample.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/context/axis_range.hpp"
#include "tests/parallel/comm/delayed_copies.hpp"
#include "tests/parallel/small_training.hpp"

namespace ballast {
namespace {

using namespace testing;

ModelShape deep_shape() {
  ModelShape shape = small_shape();
  shape.layers = 4;
  return shape;
}

/// Every dp x pp x cp with pp of 1, 2 and 4 that fills `ranks`.
std::vector<MeshShape> chunk_meshes(int ranks) {
  std::vector<MeshShape> list;
  for (const int pp : {1, 2, 4})
    if (ranks % pp == 0)
      for (MeshShape shape : data_and_context_meshes(ranks / pp)) {
        shape.pp = pp;
        list.push_back(shape);
      }
  return list;
}

class Chunks : public ::testing::Test {
 protected:
  const int ranks = Communicator::world().size();
  const bool full = std::getenv("BALLAST_TEST_FULL") != nullptr;
  const std::string trace = fmt::format("repeat with BALLAST_TEST_SEED={}", test_seed());
  std::vector<SampleLength> samples;
  void SetUp() override {
    for (std::int64_t tokens : {71, 23, 1, 0, 40, 1, 9})
      samples.push_back(sample_of(static_cast<std::int64_t>(samples.size()), tokens));
  }
  void expect_like_whole_samples(const MeshShape& shape, const SmallOptions& options,
                                 const Reference& reference) {
    std::vector<std::int64_t> lengths;
    for (const SampleLength& s : samples) lengths.push_back(s.tokens);
    SCOPED_TRACE(fmt::format(
        "samples of {}, {}, chunks of {}, {} k {}, {}, zero {}, {}", fmt::join(lengths, " "),
        describe(shape), options.micro_batch_tokens, options.pipeline.schedule, options.pipeline.k,
        options.kv_place.offload
            ? fmt::format("offload, windows of {}", options.kv_place.window_tokens)
            : "resident",
        options.zero, name(options.attention.pattern)));
    const Mesh& mesh = mesh_of(shape);
    SmallTraining training(mesh, options);
    const double loss = training.gradients(samples);
    EXPECT_NEAR(loss, reference.loss, 1e-10 * reference.loss);
    EXPECT_NEAR(training.norm, reference.norm, 1e-10 * reference.norm);
    const auto [error, where] = worst_gradient(training, mesh.world, reference);
    EXPECT_LT(error, 1e-10) << where;
  }
  static SmallOptions options_of(std::int64_t tokens, int k,
                                 ScheduleKind schedule = ScheduleKind::state_aware_1f1b) {
    SmallOptions options;
    options.shape = deep_shape();
    options.method = Batching::chunkflow;
    options.micro_batch_tokens = tokens;
    options.pipeline.schedule = schedule;
    options.pipeline.k = k;
    options.pipeline.search = 8;
    return options;
  }
};

TEST_F(Chunks, EverySizeAndKEqualsWholeSamples) {
  SCOPED_TRACE(trace);
  const Reference reference = reference_step(samples, DType::f64, deep_shape());
  int turn = 0;
  for (const MeshShape& shape : chunk_meshes(ranks))
    for (const std::int64_t tokens : {5, 16, 48, 100})
      for (const int k : {1, 2, 9}) {
        if (turn++ % (ranks > 4 ? 5 * ranks : ranks) != 0)
          continue;  // more ranks are slower, and have more meshes
        SmallOptions options = options_of(tokens, k,
                                          turn % 7 == 0   ? ScheduleKind::one_f_one_b
                                          : turn % 7 == 3 ? ScheduleKind::gpipe
                                          : turn % 2 == 0 ? ScheduleKind::zero_bubble
                                                          : ScheduleKind::state_aware_1f1b);
        options.zero = turn % 3;
        options.recompute = turn % 4 == 0 ? RecomputeOptions{Recompute::full, -1}
                            : turn % 4 == 1
                                ? RecomputeOptions{Recompute::selective, turn % 8 == 1 ? -1 : 1}
                                : RecomputeOptions{};
        options.layout = turn % 2 == 0 ? LayoutKind::zigzag : LayoutKind::striped;
        options.stripe = 3;
        options.kv_place.offload = turn % 2 == 1;
        options.kv_place.window_tokens = turn % 3 == 0 ? 1 : 40;
        expect_like_whole_samples(shape, options, reference);
      }
}

// The head costs a tenth of a step where vocabularies are large: a chunk that is forwarded twice
// runs it the second time only, its backward with it.
TEST_F(Chunks, HeadRunsOnce) {
  SCOPED_TRACE(trace);
  const MeshShape shape = chunk_meshes(ranks).back();
  Recorder recorder;
  SmallOptions options = options_of(16, 1);
  options.recorder = &recorder;
  const Mesh& mesh = mesh_of(shape);
  SmallTraining training(mesh, options);
  recorder.flush({});
  training.gradients(samples);
  std::map<int, int> forwards, heads;
  for (const Op& op : training.schedule.stages[static_cast<std::size_t>(mesh.at.pp)])
    if (op.kind == OpKind::forward || op.kind == OpKind::recompute) ++forwards[op.micro_batch];
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events)
      if (e.kind == EventKind::head) ++heads[e.micro_batch];
  });
  int twice = 0;
  for (const auto& [micro_batch, count] : forwards) {
    EXPECT_EQ(heads[micro_batch], mesh.at.pp + 1 == mesh.shape.pp ? 1 : 0);
    twice += count == 2;
  }
  EXPECT_TRUE(twice > 0 || mesh.at.dp > 0) << "no chunk was recomputed";
}

TEST_F(Chunks, CopiesThatComeLateAreWaitedFor) {
  SCOPED_TRACE(trace);
  const Reference reference = reference_step(samples, DType::f64, deep_shape());
  DelayedCopies late;
  int turn = 0, mesh = 0;
  for (const MeshShape& shape : chunk_meshes(ranks)) {
    if (shape.dp > 2 || mesh++ % std::max(1, ranks / 2) != 0) continue;
    const ScheduleKind schedules[] = {ScheduleKind::state_aware_1f1b, ScheduleKind::zero_bubble,
                                      ScheduleKind::one_f_one_b};
    SmallOptions options = options_of(turn % 2 == 0 ? 5 : 16, 1 + turn % 2, schedules[turn % 3]);
    options.recompute = turn % 4 == 1 ? RecomputeOptions{Recompute::full, -1} : RecomputeOptions{};
    options.kv_place.offload = true;
    options.kv_place.window_tokens = turn % 3 == 2 ? 1 : 17;
    expect_like_whole_samples(shape, options, reference);
    ++turn;
  }
  EXPECT_GT(late.copies(), 0);
  EXPECT_EQ(late.torn(), 0);
}

TEST_F(Chunks, SparsePatternsChooseTheSameIndex) {
  SCOPED_TRACE(trace);
  samples = {sample_of(0, 700), sample_of(1, 128), sample_of(2, 70)};
  AttentionOptions moba, xattention, causal;
  moba.pattern = PatternKind::moba;
  moba.moba_block = 64;
  moba.moba_top_k = 2;
  xattention.pattern = PatternKind::xattention;
  xattention.xattention_threshold = 0.05;
  causal.pattern = PatternKind::vertical_slash;
  causal.selection = IndexSelection::causal;
  causal.stretch = 64;
  causal.last_q = 40;
  causal.vertical_share = causal.slash_share = 0.05;
  int turn = 0;
  for (const AttentionOptions& attention : {moba, xattention, causal}) {
    const Reference dense = reference_step(samples, DType::f64, deep_shape());
    const Reference reference = reference_step(samples, DType::f64, deep_shape(), attention);
    EXPECT_GT(std::abs(reference.norm - dense.norm), 1e-6 * dense.norm)
        << name(attention.pattern) << " leaves nothing out";
    for (const MeshShape& shape : chunk_meshes(ranks)) {
      if (shape.dp > 1 || shape.cp() > 2) continue;
      SmallOptions options = options_of(128, 1);
      options.attention = attention;
      options.kv_place.offload = turn++ % 2 == 1;
      options.kv_place.window_tokens = 200;
      std::optional<DelayedCopies> late;
      if (options.kv_place.offload) late.emplace();
      expect_like_whole_samples(shape, options, reference);
    }
  }
}

/// Passes a source's indexes on and hands each to `take` the first time.
class Listening final : public IndexSource {
 public:
  using Take = std::function<void(int layer, const AttentionPattern& index)>;
  Listening(std::unique_ptr<IndexSource> source, Take take)
      : IndexSource(source->axes()), source_(std::move(source)), take_(std::move(take)) {}
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) override {
    const auto& made = source_->shards(in);
    if (seen_.insert(in.layer).second) take_(in.layer, *made.front().host());
    return made;
  }
  bool reads_keys(int layer) const override { return source_->reads_keys(layer); }

 private:
  std::unique_ptr<IndexSource> source_;
  Take take_;
  std::set<int> seen_;
};

/// Given indexes, one a layer.
class Given final : public IndexSource {
 public:
  Given(AttentionAxes axes, std::map<int, std::vector<AttentionWork>> layers)
      : IndexSource(std::move(axes)), layers_(std::move(layers)) {}
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) override {
    return layers_.at(in.layer);
  }

 private:
  std::map<int, std::vector<AttentionWork>> layers_;
};

/// The chunks' indexes of one layer as one index of the whole sample; a chunk becomes a segment,
/// because each has columns of its own.
AttentionPattern stitched(const std::vector<PatternArrays>& chunks) {
  PatternArrays all;
  all.index_heads = chunks.front().index_heads;
  all.segments = static_cast<int>(chunks.size());
  all.k_tokens = chunks.back().k_tokens;
  all.run_offset = {0};
  all.column_offset = {0};
  std::vector<std::int32_t> mask_base;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    for (const KeyInterval& keys : chunks[c].visible.expand())
      all.visible.add(1, keys.begin, keys.end, 0);
    mask_base.push_back(static_cast<std::int32_t>(all.row_masks.size()));
    all.row_masks.insert(all.row_masks.end(), chunks[c].row_masks.begin(),
                         chunks[c].row_masks.end());
    all.block_segment.insert(all.block_segment.end(),
                             static_cast<std::size_t>(chunks[c].q_blocks()),
                             static_cast<std::int32_t>(c));
  }
  for (int h = 0; h < all.index_heads; ++h)
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      const PatternArrays& chunk = chunks[c];
      for (std::int64_t list = h * chunk.q_blocks(); list < (h + 1) * chunk.q_blocks(); ++list) {
        for (std::int64_t r = chunk.run_offset[list]; r < chunk.run_offset[list + 1]; ++r) {
          BlockRun run = chunk.runs[r];
          if (run.row_mask >= 0) run.row_mask += mask_base[c];
          all.runs.push_back(run);
        }
        all.run_offset.push_back(static_cast<std::int64_t>(all.runs.size()));
      }
      if (!chunk.column_offset.empty())
        all.columns.insert(all.columns.end(), chunk.columns.begin() + chunk.column_offset[h],
                           chunk.columns.begin() + chunk.column_offset[h + 1]);
      all.column_offset.push_back(static_cast<std::int64_t>(all.columns.size()));
    }
  cover_columns(all);
  return AttentionPattern(std::move(all));
}

TEST_F(Chunks, VerticalSlashEqualsWholeSamplesUnderTheStitchedIndex) {
  SCOPED_TRACE(trace);
  if (ranks > 1) GTEST_SKIP() << "one rank sees whole indexes";
  samples = {sample_of(0, 500), sample_of(1, 300)};
  SmallOptions options = options_of(128, 1);
  options.attention.pattern = PatternKind::vertical_slash;
  options.attention.vertical_share = 0.3;
  options.attention.slash_share = 0.4;
  std::map<std::int64_t, std::map<int, std::map<std::int64_t, AttentionPattern>>>
      seen;  // sample, layer, first token of the chunk
  options.wrap_source = [&](const MicroBatch& micro_batch,
                            std::unique_ptr<IndexSource> source) -> std::unique_ptr<IndexSource> {
    const Segment& segment = micro_batch.segments.at(0);
    return std::make_unique<Listening>(std::move(source),
                                       [&seen, segment](int layer, const AttentionPattern& index) {
                                         seen[segment.sample][layer][segment.begin] = index;
                                       });
  };
  const Mesh& mesh = mesh_of(MeshShape());
  SmallTraining chunked(mesh, options);  // with the whole index in one call
  const double loss = chunked.gradients(samples);
  SmallOptions whole = options;
  double computed = 0, visible = 0;
  whole.wrap_source = [&](const MicroBatch& micro_batch,
                          std::unique_ptr<IndexSource> source) -> std::unique_ptr<IndexSource> {
    std::map<int, std::vector<AttentionWork>> layers;
    for (const auto& [layer, chunks] : seen.at(micro_batch.segments.at(0).sample)) {
      std::vector<PatternArrays> ordered;
      for (const auto& [begin, index] : chunks) ordered.push_back(index.arrays());
      const AttentionPattern all = stitched(ordered);
      EXPECT_EQ(problems(all.arrays()), "");
      computed += all.pairs_per_head();
      visible += all.visible_pairs();
      layers[layer] = {all};
    }
    return std::make_unique<Given>(source->axes(), std::move(layers));
  };
  const Reference reference = reference_step(samples, whole);
  EXPECT_LT(computed, 0.9 * visible);
  EXPECT_NEAR(loss, reference.loss, 1e-10 * reference.loss);
  const auto [error, where] = worst_gradient(chunked, mesh.world, reference);
  EXPECT_LT(error, 1e-10) << where;
  // Put away in host memory the chunks choose the same.
  options.wrap_source = nullptr;
  options.kv_place.offload = true;
  options.kv_place.window_tokens = 130;
  expect_like_whole_samples(MeshShape(), options, reference);
}

TEST_F(Chunks, WhatIsKeptDoesNotGrowWithTheSample) {
  SCOPED_TRACE(trace);
  if (ranks > 2) GTEST_SKIP() << "one and two stages show it";
  MeshShape shape;
  shape.pp = ranks;
  const auto peaks = [&](std::int64_t tokens, bool offload) {
    samples = {sample_of(0, tokens)};
    SmallOptions options = options_of(32, 1);
    options.kv_place.offload = offload;
    options.kv_place.window_tokens = 64;
    SmallTraining training(mesh_of(shape), options);
    reset_peak_memory();
    training.gradients(samples);
    return memory_use();
  };
  const auto peak = [](const MemoryUse& use, MemoryCategory category) {
    return use.peak[static_cast<int>(category)];
  };
  const MemoryUse small = peaks(256, true), large = peaks(1024, true),
                  resident = peaks(1024, false);
  EXPECT_EQ(peak(large, MemoryCategory::activations), peak(small, MemoryCategory::activations));
  EXPECT_EQ(peak(large, MemoryCategory::kv_store), peak(small, MemoryCategory::kv_store));
  EXPECT_EQ(peak(resident, MemoryCategory::offloaded), 0);
  EXPECT_GT(peak(resident, MemoryCategory::kv_store), 2 * peak(large, MemoryCategory::kv_store));
  EXPECT_GT(peak(large, MemoryCategory::offloaded), 3 * peak(small, MemoryCategory::offloaded));
}

TEST_F(Chunks, OpsAndTransfersAreRecorded) {
  SCOPED_TRACE(trace);
  MeshShape shape;
  shape.pp = std::min(ranks, 4);
  shape.dp = ranks / shape.pp;
  Recorder recorder;
  samples = {sample_of(0, 100), sample_of(1, 90), sample_of(2, 3)};
  SmallOptions options = options_of(16, 1);
  options.recorder = options.kv_place.recorder = &recorder;
  options.kv_place.offload = true;
  SmallTraining training(mesh_of(shape), options);
  training.gradients(samples);
  std::vector<std::tuple<EventKind, int, int>> done, planned;
  std::int64_t fetched = 0;
  recorder.flush([&](std::span<const Event> events) {
    for (const Event& e : events) {
      if (e.kind <= EventKind::fetch && e.layer < 0)
        done.emplace_back(e.kind, e.micro_batch, e.chunk);
      if (e.kind == EventKind::fetch && e.layer >= 0) fetched += e.bytes;
    }
  });
  bool inputs_move = false;
  for (const Op& op : training.schedule.stages.at(mesh_of(shape).at.pp)) {
    planned.emplace_back(event_kind(op.kind), op.micro_batch, op.chunk);
    inputs_move |= op.kind == OpKind::offload;
  }
  EXPECT_TRUE(done == planned);
  EXPECT_GT(fetched, 0);
  EXPECT_EQ(inputs_move, mesh_of(shape).at.pp > 0);
}

TEST_F(Chunks, RandomMixesEqualWholeSamples) {
  SCOPED_TRACE(trace);
  SharedDraw draws(78);
  const std::vector<MeshShape> meshes = chunk_meshes(ranks);
  const ScheduleKind schedules[] = {ScheduleKind::one_f_one_b, ScheduleKind::state_aware_1f1b,
                                    ScheduleKind::zero_bubble, ScheduleKind::zero_bubble};
  for (int mix = 0; mix < (full ? 200 : 4); ++mix) {
    samples.clear();
    const std::int64_t count = draws.integer(1, 8);
    for (std::int64_t s = 0; s < count; ++s)
      samples.push_back(
          sample_of(s, draws.integer(0, 4) == 0 ? draws.integer(40, 120) : draws.integer(0, 20)));
    const Reference reference = reference_step(samples, DType::f64, deep_shape());
    SmallOptions options = options_of(draws.integer(3, 50), static_cast<int>(draws.integer(1, 4)),
                                      schedules[draws.integer(0, 3)]);
    options.zero = static_cast<int>(draws.integer(0, 2));
    options.kv_place.offload = draws.integer(0, 1) == 1;
    options.kv_place.window_tokens = draws.integer(1, 100);
    expect_like_whole_samples(meshes[static_cast<std::size_t>(
                                  draws.integer(0, static_cast<std::int64_t>(meshes.size()) - 1))],
                              options, reference);
  }
}

// Samples whose mask leaves a few tokens with loss, such as one answer at the end of a long text:
// most chunks hold none, and a plan cannot know which.
TEST_F(Chunks, MaskedSamplesEqualWholeOnes) {
  SCOPED_TRACE(trace);
  samples.clear();
  for (std::int64_t tokens : {61, 4, 90, 18, 2})
    samples.push_back(sample_of(kMaskedSample + static_cast<std::int64_t>(samples.size()), tokens));
  const Reference reference = reference_step(samples, DType::f64, deep_shape());
  int turn = 0;
  for (const MeshShape& shape : chunk_meshes(ranks))
    for (std::int64_t tokens : {3, 16}) {
      SmallOptions options =
          options_of(tokens, 1 + turn % 3,
                     turn % 2 == 0 ? ScheduleKind::state_aware_1f1b : ScheduleKind::zero_bubble);
      options.kv_place.offload = turn++ % 3 == 1;
      expect_like_whole_samples(shape, options, reference);
    }
}

TEST_F(Chunks, WhatIsFetchedHasBeenPutAway) {
  DelayedCopies late;
  SharedDraw draws(79);
  const auto random = [&] {
    Tensor t = Tensor::empty({1, 2, 4}, DType::f64);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.data<double>()[i] = static_cast<double>(draws.integer(-1000, 1000));
    return t;
  };
  KvPlace place;
  place.offload = true;
  place.window_tokens = 1;
  const AxisRanges a{{0, 0}}, b{{0, 1}}, c{{0, 2}};
  KvStore store({{a}, {b}, {c}}, 0, 1, place);
  std::vector<RingBuffers::Lease>
      held;  // so that no buffer is used again, which would wait for its copy
  const auto hold = [&] {
    held.push_back(place.device->take({2, 1, 2, 4}, DType::f64, host_device()));
  };
  std::vector<Tensor> k, v;
  for (int chunk = 0; chunk < 3; ++chunk) {
    k.push_back(random());
    v.push_back(random());
    store.keys(0, chunk, 0, k[chunk], v[chunk]);
    hold();
  }
  KvStore::Keys came = store.keys(0, 2, 2, k[2], v[2]);
  store.arrive(came);
  EXPECT_TRUE(bit_equal(came.k, k[1]) && bit_equal(came.v, v[1]));
  {
    KvStore::Sums sums = store.sums(0, 2, 2);
    store.arrive(sums);
    sums.dk.copy_from(k[0]);
    sums.dv.copy_from(v[0]);
    store.keep(0, 2, 2, sums);
  }
  hold();
  KvStore::Sums sums = store.sums(0, 1, 0);
  store.arrive(sums);
  EXPECT_TRUE(bit_equal(sums.dk, k[0]) && bit_equal(sums.dv, v[0]));
}

TEST_F(Chunks, OrderOfUseIsChecked) {
  const KvPlace place;
  const AxisRanges first{{0, 0, 2}}, second{{0, 2}};
  KvStore store({{first}, {second}}, 0, 1, place);
  const Tensor one = Tensor::zeros({1, 2, 4}, DType::f64),
               two = Tensor::zeros({2, 2, 4}, DType::f64);
  EXPECT_EQ(token_count(store.axes(1).keys[0]), 3);
  EXPECT_EQ(store.axes(1).first_query, std::vector<std::int64_t>{2});
  EXPECT_THROW(store.keys(0, 1, 0, one, one), Error) << "before chunk 0";
  EXPECT_THROW(store.keys(0, 0, 0, one, one), Error) << "another length";
  EXPECT_EQ(store.keys(0, 0, 0, two, two).k.size(0), 2);
  EXPECT_EQ(store.keys(0, 1, 0, one, one).k.size(0), 3);
  EXPECT_THROW(store.sums(0, 0, 0), Error) << "the last chunk goes first";
  EXPECT_THROW(store.keys(0, 1, 1, one, one), Error) << "one turn";
  EXPECT_THROW(KvStore({{first}, {second, second}}, 0, 1, place), Error);
}

}  // namespace
}  // namespace ballast
