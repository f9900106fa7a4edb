// What the choice of patterns takes on the host, and that a rank's memory has it.
#include <gtest/gtest.h>

#include "core/predict/index_workspace.hpp"
#include "core/predict/memory_replay.hpp"

namespace ballast {
namespace {

IndexRule rule_of(PatternKind pattern) {
  IndexRule rule;
  rule.options.pattern = pattern;
  rule.options.last_q = 16;
  return rule;
}

IndexWork index_work_of(const IndexRule& rule, const std::vector<std::int64_t>& lengths,
                        int ring = 1) {
  std::vector<Segment> segments;
  for (const std::int64_t n : lengths)
    segments.push_back({static_cast<std::int64_t>(segments.size()), 0, n});
  return index_work(rule, segments, ring, false);
}

TEST(IndexWorkspace, WhatLooksAtNoRowsTakesNothing) {
  for (const PatternKind pattern : {PatternKind::dense, PatternKind::moba, PatternKind::xattention})
    EXPECT_EQ(index_work_of(rule_of(pattern), {1000}), IndexWork{});
  IndexRule full = rule_of(PatternKind::vertical_slash);
  EXPECT_GT(std::ssize(index_work_of(full, {1000}).batches), 0);
  EXPECT_EQ(index_work_of(full, {16, 5}), IndexWork{}) << "computed whole";
  full.options.slash_share = 1;
  EXPECT_EQ(index_work_of(full, {1000}), IndexWork{});
  full.budgeted = true;
  EXPECT_GT(std::ssize(index_work_of(full, {1000}).batches), 0);
}

TEST(IndexWorkspace, CountsRowsKeysAndLists) {
  IndexRule rule = rule_of(PatternKind::vertical_slash);
  const std::vector<std::int64_t> lengths{300, 10, 100};
  const ObservedBatch batch = index_work_of(rule, lengths).batches.at(0);
  EXPECT_EQ(batch.keys.rows, 2 * 16);
  EXPECT_EQ(batch.keys.pairs, 16 * (300 + 100) - 2 * 16 * 15 / 2);
  EXPECT_EQ(batch.slots, 5 + 2);
  EXPECT_EQ(batch.parts, 1);
  EXPECT_EQ(batch.sent, 400);
  EXPECT_EQ(index_work_of(rule, lengths, 4).batches.at(0).sent, 128 + 64);
  rule.options.max_columns = 60;  // what a cap leaves out is counted too
  EXPECT_EQ(index_work_of(rule, lengths, 4).batches.at(0).sent, 128 + 64);
  rule.options.max_columns = 0;
  // Longer samples have more stretches, not more at a time for their length.
  rule.options.selection = IndexSelection::causal;
  rule.options.stretch = 64;
  for (const std::int64_t n : {640, 6400}) {
    std::int64_t most = 0;
    for (const ObservedBatch& b : index_work_of(rule, {n}).batches)
      most = std::max(most, b.keys.pairs);
    EXPECT_LE(most, 16 * n);
    EXPECT_GT(most, 8 * n);
  }
}

TEST(IndexWorkspace, RecallLooksAtRowsAllOverTheSegmentsThatAreNotWhole) {
  IndexRule rule = rule_of(PatternKind::moba);
  rule.options.recall_every = 2;
  rule.options.recall_rows = 10;
  const IndexWork work = index_work_of(rule, {1000, 16, 100});
  EXPECT_EQ(work.recall.rows, 20);
  EXPECT_EQ(work.recall.pairs, 10 * 1001 / 2 + 10 * 101 / 2);
  EXPECT_EQ(work.recall_blocks, 10 * 16 + 10 * 2);
}

/// Workspace at the peak of two micro-batches, one after the other.
std::int64_t workspace(StageMemory stage, const IndexWork& work) {
  stage.model.layers = stage.layers = 3;
  stage.model.hidden = 8, stage.model.intermediate = 16;
  stage.model.query_heads = stage.model.kv_heads = 2, stage.model.head_dim = 4;
  stage.model.vocabulary = 10;
  RankMicroBatch m;
  m.tokens = m.shard_tokens = m.hop_tokens = 640;
  m.index = work;
  const Op forward{OpKind::forward}, backward{OpKind::backward};
  return replay_memory(stage, {{forward, backward}, {m}})[MemoryCategory::workspace];
}

TEST(IndexWorkspace, CountsInAForwardAndForNoLongerThanALayerChooses) {
  IndexRule rule = rule_of(PatternKind::vertical_slash);
  rule.options.last_q = 64;
  const IndexWork work = index_work_of(rule, {640});
  const ChoiceBytes bytes = choice_bytes(work, {2, 2, 4, 640, 1, DType::f32});
  const std::int64_t none = workspace({}, {});
  // More than the tiles that a layer takes afterwards; once, not a layer each.
  EXPECT_GT(workspace({}, work), none);
  EXPECT_LE(workspace({}, work), none + bytes.observed);
  rule.options.recall_every = 1;
  rule.options.recall_rows = 640;
  const IndexWork recalled = index_work_of(rule, {640});
  const std::int64_t recall = choice_bytes(recalled, {2, 2, 4, 640, 1, DType::f32}).recall;
  EXPECT_GT(recall, bytes.observed);
  EXPECT_EQ(workspace({}, recalled) - workspace({}, work), recall - bytes.observed);
}

}  // namespace
}  // namespace ballast
