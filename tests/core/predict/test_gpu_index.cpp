// What a GPU's patterns hold, against counts over rows and tiles, and that a rank's memory has it.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/plan/attention/device_index.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "core/predict/gpu_index.hpp"
#include "core/predict/memory_replay.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kQueryHeads = 8, kKvHeads = 2, kDim = 128;

std::vector<Segment> segments_of(const std::vector<std::int64_t>& lengths) {
  std::vector<Segment> segments;
  for (const std::int64_t n : lengths)
    segments.push_back({static_cast<std::int64_t>(segments.size()), 0, n});
  return segments;
}
std::int64_t aligned(const std::vector<Segment>& segments) {
  std::int64_t tokens = 0;
  for (const Segment& s : segments)
    tokens += ((s.end + kBlock - 1) / kBlock - s.begin / kBlock) * kBlock;
  return tokens;
}

GpuIndexRule gpu_rule_of(PatternKind pattern) {
  GpuIndexRule rule{{}, kQueryHeads, kKvHeads, kDim};
  rule.options.pattern = pattern;
  rule.options.moba_top_k = 4;
  return rule;
}
GpuIndexBytes bytes_of(const GpuIndexRule& rule, const std::vector<Segment>& segments) {
  const std::int64_t tokens = aligned(segments);
  return gpu_index_bytes(rule, segments, {tokens, 1, 1, {{tokens}}});
}

cuda::IndexShape shape_of(std::int64_t tokens) {
  cuda::IndexShape s;
  s.q_tokens = s.k_tokens = tokens;
  s.q_heads = kQueryHeads, s.kv_heads = kKvHeads;
  return s;
}

/// Tiles that query blocks of segments see, of each `most` at most.
std::int64_t tiles(const std::vector<Segment>& segments, std::int64_t most) {
  std::int64_t sum = 0;
  for (const Segment& s : segments)
    for (std::int64_t b = s.begin / kBlock; b * kBlock < s.end; ++b) sum += std::min(b + 1, most);
  return sum;
}

TEST(GpuIndex, DenseHoldsOneOfAMicroBatch) {
  cuda::IndexShape shape = shape_of(1024);
  shape.dense = true;
  for (const PatternKind pattern : {PatternKind::dense, PatternKind::moba}) {
    const GpuIndexBytes found = bytes_of(gpu_rule_of(pattern), segments_of({1000}));
    EXPECT_EQ(found.micro_batch, std::int64_t(cuda::held_bytes(shape))) << name(pattern);
    EXPECT_EQ(found.layers, std::vector<std::int64_t>{0}) << "all of four blocks of 256 are chosen";
    EXPECT_EQ(found.choosing, 0);
  }
}

TEST(GpuIndex, RoutedListsHoldTheEntriesOfRowsThatChoose) {
  const auto segments = segments_of({5000, 700, 3000});
  const GpuIndexBytes found = bytes_of(gpu_rule_of(PatternKind::moba), segments);
  std::int64_t entries = 0;
  for (const Segment& s : segments)
    for (std::int64_t t = s.begin; t < s.end; ++t)
      if (t / 256 > 3) entries += 3 * kQueryHeads;  // three besides its own, of more before it
  const std::int64_t places = kQueryHeads * aligned(segments) * 3;
  EXPECT_GT(found.layer(0), (entries + places) * 4);
  EXPECT_LT(static_cast<double>(found.layer(0)), 1.05 * static_cast<double>(entries + places) * 4);
  EXPECT_EQ(found.kernels, entries * (kDim * 2 + 4)) << "partial outputs";
  EXPECT_GT(found.micro_batch, 0) << "each row's own block";
}

TEST(GpuIndex, PartialOutputsOfRoutedListsHaveALimit) {
  const GpuIndexBytes found = bytes_of(gpu_rule_of(PatternKind::moba), segments_of({1 << 20}));
  EXPECT_LT(found.kernels, std::int64_t{2200} << 20);
  EXPECT_GT(found.kernels, std::int64_t{1900} << 20);
}

TEST(GpuIndex, WhereRoutedListsDoNotServeAllTilesAreListed) {
  const auto segments = segments_of({4096});
  const std::int64_t all = kQueryHeads * tiles(segments, 64);
  std::vector<GpuIndexRule> rules(4, gpu_rule_of(PatternKind::moba));
  rules[0].deterministic = true;
  rules[1].head_dim = 256;
  rules[2].options.moba_block = 64;
  rules[3].options.moba_block = 512;
  for (const GpuIndexRule& rule : rules) {
    cuda::IndexShape shape = shape_of(4096);
    shape.index_heads = kQueryHeads;
    shape.block_pairs = all;
    shape.runs = shape.row_masks = std::min(all, all / (rule.options.moba_block / kBlock) + 512);
    const GpuIndexBytes found = bytes_of(rule, segments);
    EXPECT_NEAR(static_cast<double>(found.layer(0)), static_cast<double>(cuda::held_bytes(shape)),
                8192);
    EXPECT_EQ(found.micro_batch, 0);
  }
}

TEST(GpuIndex, SlashesAndColumnsFollowTheirCaps) {
  GpuIndexRule rule = gpu_rule_of(PatternKind::vertical_slash);
  rule.options.max_slashes = 5, rule.options.max_columns = 300;
  const auto segments = segments_of({4096, 64, 1000});  // the second is no longer than last_q
  cuda::IndexShape shape = shape_of(aligned(segments));
  shape.index_heads = kQueryHeads;
  shape.segments = 3;
  shape.block_pairs = shape.runs = kQueryHeads * tiles(segments, 5 + 2);
  shape.columns = kQueryHeads * 2 * 300;
  shape.cover_words = kQueryHeads * shape.q_blocks() * 5;
  const GpuIndexBytes found = bytes_of(rule, segments);
  EXPECT_EQ(found.layer(0), std::int64_t(cuda::held_bytes(shape)));
  rule.budgets = {1, 2};  // slashes, and 128 columns
  shape.block_pairs = shape.runs = kQueryHeads * tiles(segments, 2 + 2);
  shape.columns = kQueryHeads * 2 * 128;
  shape.cover_words = kQueryHeads * shape.q_blocks() * 2;
  EXPECT_EQ(bytes_of(rule, segments).layer(0), std::int64_t(cuda::held_bytes(shape)));
}

TEST(GpuIndex, RanksOfARingShareTheTilesAndCallsSplitThem) {
  const std::int64_t n = 1 << 15;
  const auto segments = segments_of({n});
  const auto on = [&](const GpuIndexRule& rule, int ring, int sp = 1) {
    const GpuIndexPart part{n / ring, ring, sp, {{n / ring, ring}}};
    return static_cast<double>(gpu_index_bytes(rule, segments, part).layer(0));
  };
  GpuIndexRule rule = gpu_rule_of(PatternKind::xattention);
  const double whole = on(rule, 1);
  EXPECT_NEAR(on(rule, 4), whole / 4, 0.07 * whole) << "arrays of keys in every call";
  EXPECT_NEAR(on(rule, 1, 2), whole / 2, 0.04 * whole) << "half of the heads each";
  rule.options.xattention_threshold = 0.3;
  EXPECT_LT(on(rule, 1), 0.6 * whole);
  // Slashes, and heads that go by blocks among them, have place in every call.
  const GpuIndexRule flex = gpu_rule_of(PatternKind::flexprefill);
  EXPECT_GT(on(flex, 4), 0.9 * on(flex, 1));
}

TEST(GpuIndex, BudgetsThatTakeAllLeaveThoseThatDoNot) {
  const auto segments = segments_of({4096});
  GpuIndexRule rule = gpu_rule_of(PatternKind::moba);
  const GpuIndexBytes four = bytes_of(rule, segments);
  rule.options.moba_top_k = 100;
  rule.budgets = {1, 4, 16};  // sixteen blocks of 256 are all
  EXPECT_EQ(bytes_of(rule, segments), four);
  rule.budgets = {16, 32};
  EXPECT_EQ(bytes_of(rule, segments).layer(0), 0) << "dense";
}

TEST(GpuIndex, AShareOfOneIsAllTilesAndNoColumn) {
  GpuIndexRule rule = gpu_rule_of(PatternKind::vertical_slash);
  rule.options.slash_share = 1;
  const auto segments = segments_of({1 << 15});
  cuda::IndexShape shape = shape_of(1 << 15);
  shape.index_heads = kQueryHeads;
  shape.block_pairs = shape.runs = kQueryHeads * tiles(segments, 512);
  const GpuIndexBytes found = bytes_of(rule, segments);
  EXPECT_EQ(found.layer(0), std::int64_t(cuda::held_bytes(shape)));
  EXPECT_EQ(found.micro_batch, 0) << "nothing is observed";
}

TEST(GpuIndex, RecordedIndexesAreNotCounted) {
  GpuIndexRule rule = gpu_rule_of(PatternKind::vertical_slash);
  rule.options.index = IndexOrigin::recorded;
  EXPECT_EQ(bytes_of(rule, segments_of({4096})), GpuIndexBytes{});
}

TEST(GpuIndex, EveryLayerOfATableHoldsItsOwn) {
  auto table = std::make_shared<HeadTable>(3, static_cast<int>(kQueryHeads));
  for (int h = 0; h < kQueryHeads; ++h) {
    table->at(1, h) = {HeadPattern::a_shape, 128, 256};
    table->at(2, h) = {HeadPattern::block_sparse, 0, 0, 0, 0, 8};
  }
  GpuIndexRule rule = gpu_rule_of(PatternKind::by_head);
  rule.options.heads = table;
  EXPECT_EQ(std::ssize(bytes_of(rule, segments_of({8192})).layers), 1) << "as all are dense";
  const auto segments = segments_of({1 << 15});
  const GpuIndexBytes found = bytes_of(rule, segments);
  ASSERT_EQ(std::ssize(found.layers), 3);
  const std::int64_t each = 12 + 12;  // a run, and the same transposed
  EXPECT_NEAR(
      static_cast<double>(found.layer(0) - found.layer(2)),
      static_cast<double>(each * kQueryHeads * (tiles(segments, 512) - tiles(segments, 10))), 4096);
}

TEST(GpuIndex, RanksThatShareHeadsCountTheFullestRange) {
  auto table = std::make_shared<HeadTable>(1, static_cast<int>(kQueryHeads));
  for (int h = 0; h < kQueryHeads / 2; ++h)
    table->at(0, h) = {HeadPattern::block_sparse, 0, 0, 0, 0, 8};
  GpuIndexRule rule = gpu_rule_of(PatternKind::by_head);
  rule.options.heads = table;
  const auto segments = segments_of({1 << 15});
  const auto half = [&] {
    return gpu_index_bytes(rule, segments, {1 << 15, 1, 2, {{1 << 15}}}).layer(0);
  };
  const std::int64_t uneven = half();
  for (int h = 0; h < kQueryHeads / 2; ++h) table->at(0, h) = {};
  EXPECT_EQ(uneven, half()) << "the second rank's heads are dense either way";
}

TEST(GpuIndex, ARankHoldsThatOfEveryLayerUntilBackward) {
  StageMemory stage;
  stage.model.layers = 5, stage.layers = 3, stage.first_layer = 2;
  stage.model.hidden = 64, stage.model.intermediate = 128;
  stage.model.query_heads = stage.model.kv_heads = 2, stage.model.head_dim = 32;
  stage.model.vocabulary = 100;
  stage.host = false;
  StageWork step;
  for (const auto kind : {OpKind::forward, OpKind::backward})
    for (int m = 0; m < 2; ++m) step.ops.push_back({kind, m});
  RankMicroBatch part;
  part.tokens = part.shard_tokens = part.hop_tokens = part.longest = 512;
  const auto workspace = [&](const GpuIndexBytes& bytes) {
    part.gpu_index = bytes;
    step.list = {part, part};
    return replay_memory(stage, step)[MemoryCategory::workspace];
  };
  const std::int64_t none = workspace({});
  GpuIndexBytes bytes;
  bytes.micro_batch = 1 << 20;
  constexpr std::int64_t other = std::int64_t{1} << 40, own = std::int64_t{4} << 20;
  bytes.layers = {other, other, own, own, own};
  bytes.kernels = 1 << 22;
  EXPECT_EQ(workspace(bytes) - none,
            (std::int64_t{2} << 20) + 2 * 3 * (std::int64_t{4} << 20) + (std::int64_t{4} << 20));
}

}  // namespace
}  // namespace ballast
