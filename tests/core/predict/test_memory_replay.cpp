// Memory of a rank, replayed: what is held for a whole step, pools, chunks and schedules.
#include <gtest/gtest.h>

#include "core/model/tensor_specs.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/predict/memory_replay.hpp"

namespace ballast {
namespace {

StageMemory small_stage() {
  StageMemory stage;
  stage.model.layers = stage.layers = 3;
  stage.model.hidden = 8;
  stage.model.intermediate = 16;
  stage.model.query_heads = stage.model.kv_heads = 2;
  stage.model.head_dim = 4;
  stage.model.vocabulary = 10;
  stage.host = false;
  return stage;
}

RankMicroBatch part_of(std::int64_t tokens) {
  RankMicroBatch m;
  m.tokens = m.shard_tokens = m.hop_tokens = tokens;
  return m;
}

const std::vector<Op> kOnce{{OpKind::forward}, {OpKind::backward}};

TEST(MemoryReplay, ShardsAndTypesCountAsAllocated) {
  StageMemory stage = small_stage();
  stage.parameters = 1001;
  stage.replicas = 4;
  const auto bytes = [&](MemoryCategory category) {
    return replay_memory(stage, {kOnce, {part_of(0)}})[category];
  };
  EXPECT_EQ(bytes(MemoryCategory::parameters), 1004 * 4);
  EXPECT_EQ(bytes(MemoryCategory::gradients), 1004 * 4);
  EXPECT_EQ(bytes(MemoryCategory::optimizer), 1004 * 2 * 4);
  stage.zero = 1;
  EXPECT_EQ(bytes(MemoryCategory::optimizer), 251 * 2 * 4);
  stage.zero = 2;
  EXPECT_EQ(bytes(MemoryCategory::gradients), (1004 + 251) * 4);
  stage.type = DType::bf16;
  EXPECT_EQ(bytes(MemoryCategory::parameters), 1004 * 2);
  EXPECT_EQ(bytes(MemoryCategory::gradients), (1004 + 251) * 4);
  EXPECT_EQ(bytes(MemoryCategory::optimizer), 251 * 3 * 4);
  stage.bf16_moments = true;
  EXPECT_EQ(bytes(MemoryCategory::optimizer), 251 * (4 + 2 + 2));
  stage.bf16_moments = false;
  stage.bf16_gradients = true;
  EXPECT_EQ(bytes(MemoryCategory::gradients), 1004 * 2 + 251 * 4) << "buckets; sums stay full";
  stage.zero = 1;
  EXPECT_EQ(bytes(MemoryCategory::gradients), 1004 * 2);
  stage.bf16_gradients = false;
  // Of Muon's matrices one moment is kept: the rank with the fewest of them holds most.
  stage.muon = {{100, 0, 0}, {60, 0, 0}};
  EXPECT_EQ(bytes(MemoryCategory::optimizer), (251 * 3 - 60) * 4);
}

TEST(MemoryReplay, WhatStaysAndWhatATiedStageReceivesCount) {
  StageMemory stage = small_stage();
  stage.host = false;
  const auto bytes = [&](MemoryCategory category) {
    return replay_memory(stage, {kOnce, {part_of(0)}})[category];
  };
  const std::int64_t sent = bytes(MemoryCategory::communication),
                     used = bytes(MemoryCategory::workspace);
  stage.overlap_bytes = 1 << 20;
  stage.kept_index_bytes = 1 << 19;
  EXPECT_GE(bytes(MemoryCategory::communication), 1 << 20);
  EXPECT_LE(bytes(MemoryCategory::communication), (1 << 20) + sent);
  EXPECT_EQ(bytes(MemoryCategory::workspace), used + (1 << 19));
}

TEST(MemoryReplay, TilesAreOfAGroupOfHeadsWhereEverythingIsChosen) {
  StageMemory stage = small_stage();
  stage.host = true;  // whose attention has tiles
  stage.model.query_heads = 8;
  RankMicroBatch part = part_of(64);
  const auto bytes = [&](std::int64_t longest) {
    part.longest = longest;
    return replay_memory(stage, {kOnce, {part}})[MemoryCategory::workspace];
  };
  const std::int64_t dense = bytes(1000);
  stage.dense_keys = 512;
  EXPECT_EQ(bytes(512), dense);
  EXPECT_NE(bytes(513), dense);
}

TEST(MemoryReplay, BucketsOfZero2ExistUntilTheyAreReduced) {
  StageMemory stage = small_stage();
  stage.zero = 2;
  stage.replicas = 4;
  // Embedding, three layers, head; slices of 3, 26, 26, 26 and 5 elements.
  const auto bucket = [](std::int64_t elements, std::int64_t final_at) {
    ParameterBucket b;
    b.elements = elements, b.final_at = final_at;
    return b;
  };
  stage.buckets = {bucket(10, -1), bucket(101, 0), bucket(101, 1), bucket(101, 2),
                   bucket(20, kHeadLayer)};
  const std::int64_t shard = (3 + 3 * 26 + 5) * 4;
  const auto gradients = [&](const std::vector<Op>& ops, int micro_batches = 1, bool meets = true) {
    const std::vector<RankMicroBatch> list(static_cast<std::size_t>(micro_batches), part_of(8));
    return replay_memory(stage, {ops, list, {}, meets})[MemoryCategory::gradients] - shard;
  };
  const Op forward{OpKind::forward}, backward{OpKind::backward}, join{OpKind::collective};
  EXPECT_EQ(gradients({forward, backward, join}), 2 * 26 * 4 * 4) << "one forms, one is on its way";
  stage.model.tied_embedding = true;  // formed by the head first, final last
  EXPECT_EQ(gradients({forward, backward, join}), (3 + 2 * 26) * 4 * 4);
  stage.model.tied_embedding = false;
  // Backward in halves holds every layer's norms from the first half on; so does a rank that may
  // not wait for others inside a backward.
  const std::int64_t all = (3 + 3 * 26) * 4 * 4;
  EXPECT_EQ(gradients({forward, {OpKind::backward_input}, {OpKind::backward_weight}, join}),
            all + 5 * 4 * 4);
  EXPECT_EQ(gradients({forward, backward, join}, 1, false), all + 5 * 4 * 4);
  // A rank without a micro-batch in a round takes part with zeros, bucket by bucket.
  EXPECT_EQ(gradients({join}, 0), 26 * 4 * 4);
}

TEST(MemoryReplay, ActivationsAreThoseOfTheSpecsAndGoWithTheirLayer) {
  StageMemory stage = small_stage();
  const std::int64_t tokens = 100, all = kept_bytes(stage.model, tokens, DType::f32, Keep::all);
  const auto activations = [&] {
    return replay_memory(stage, {kOnce, {part_of(tokens)}})[MemoryCategory::activations];
  };
  // Three layers, the rotary table, and the gradient that the head leaves.
  const std::int64_t others = tokens * 4 * (2 * 2 + 8);
  EXPECT_EQ(activations(), 3 * all + others);
  stage.recompute = {Recompute::full, 2};
  EXPECT_EQ(activations(), all + 2 * tokens * 8 * 4 + others);
  // FP8 makes norms and SwiGLU's product again, but for adapters, which read them.
  stage.recompute = {};
  stage.fp8 = true;
  EXPECT_EQ(activations(),
            3 * kept_bytes(stage.model, tokens, DType::f32, Keep::selective) + others);
  stage.model.lora.rank = 4;
  EXPECT_EQ(activations(), 3 * all + others);
  stage.model.lora.rank = 0;
  stage.fp8 = false;
  // Two micro-batches at once hold twice as much, one after the other does not.
  const std::vector<RankMicroBatch> two{part_of(tokens), part_of(tokens)};
  const auto peak = [&](const std::vector<Op>& ops) {
    return replay_memory(stage, {ops, two})[MemoryCategory::activations];
  };
  EXPECT_EQ(peak({{OpKind::forward, 0},
                  {OpKind::forward, 1},
                  {OpKind::backward, 1},
                  {OpKind::backward, 0}}),
            2 * (3 * all + others));
  EXPECT_EQ(peak({{OpKind::forward, 0},
                  {OpKind::backward, 0},
                  {OpKind::forward, 1},
                  {OpKind::backward, 1}}),
            3 * all + others);
}

TEST(MemoryReplay, AStagesInputGoesWithItsFirstLayerWhateverThatKeeps) {
  StageMemory stage = small_stage();
  stage.first = false, stage.layers = 1;
  stage.recompute.mode = Recompute::full;  // keeps the input alone, which came from elsewhere
  std::vector<Op> ops;
  for (int m = 0; m < 2; ++m)
    ops.insert(ops.end(), {{OpKind::recv, m, 0, 0, Payload::activation},
                           {OpKind::forward, m},
                           {OpKind::backward_input, m}});
  for (int m = 0; m < 2; ++m) ops.push_back({OpKind::backward_weight, m});
  const std::int64_t tokens = 100, hidden = tokens * 8 * 4, table = tokens * 4 * 4,
                     halves = between_halves_bytes(stage.model, tokens, DType::f32);
  const std::vector<RankMicroBatch> two{part_of(tokens), part_of(tokens)};
  // Of the first what its weight half needs and its input's gradient; of the second, whose input
  // half runs, the input and the gradient from the head too.
  EXPECT_EQ(replay_memory(stage, {ops, two})[MemoryCategory::activations],
            halves + hidden + halves + 2 * hidden + table);
}

TEST(MemoryReplay, StoredChunksLieOnTheDeviceOrInHostMemory) {
  StageMemory stage = small_stage();
  std::vector<RankMicroBatch> chunks;
  for (int c = 0; c < 5; ++c) {
    RankMicroBatch m = part_of(20);
    m.sample = 0, m.chunk = c, m.chunks = 5, m.sample_tokens = 100, m.chunk_tokens = 20;
    chunks.push_back(m);
  }
  std::vector<Op> ops;
  for (int c = 0; c < 5; ++c) ops.push_back({OpKind::forward, c, c});
  for (int c = 4; c >= 0; --c) ops.push_back({OpKind::backward, c, c});
  const MemoryEstimate resident = replay_memory(stage, {ops, chunks});
  // Keys and values of all layers; sums of gradients until a layer's first chunk is done.
  EXPECT_EQ(resident[MemoryCategory::kv_store], 3 * 100 * 2 * 8 * (4 + 4));
  stage.offload = true;
  stage.window_tokens = 40;
  const MemoryEstimate away = replay_memory(stage, {ops, chunks});
  EXPECT_EQ(away[MemoryCategory::offloaded], 3 * 100 * 2 * 8 * (4 + 4));
  EXPECT_EQ(away[MemoryCategory::kv_store] % (40 * 2 * 8 * 4), 0) << "windows of two chunks";
  EXPECT_LT(away.total(), resident.total());
}

TEST(MemoryReplay, AnEvaluationGrowsPoolsAndKeepsNothing) {
  const StageWork step{kOnce, {part_of(64)}};
  const auto after = [&](std::int64_t tokens) {
    return replay_memory(small_stage(), step, {{{{{OpKind::forward}}, {part_of(tokens)}}, {}}});
  };
  const MemoryEstimate alone = replay_memory(small_stage(), step), some = after(64),
                       more = after(200);
  for (const MemoryCategory kept : {MemoryCategory::activations, MemoryCategory::gradients})
    EXPECT_EQ(more[kept], alone[kept]);
  // What a layer keeps for its backward lies in scratch, once for all layers.
  const auto in_scratch = [&](std::int64_t tokens) {
    return kept_bytes(small_stage().model, tokens, DType::f32, Keep::all) -
           kept_bytes(small_stage().model, tokens, DType::f32, Keep::nothing);
  };
  EXPECT_GE(some[MemoryCategory::workspace] - alone[MemoryCategory::workspace], in_scratch(64) / 2);
  EXPECT_GE(more[MemoryCategory::workspace] - some[MemoryCategory::workspace],
            in_scratch(200) - in_scratch(64));
}

TEST(MemoryReplay, ARunHoldsPoolsAsItsOwnStepsGrewThem) {
  // Short micro-batches at once, then a long one, which grows the pools.
  std::vector<Op> ops;
  for (const OpKind kind : {OpKind::forward, OpKind::backward})
    for (int m = 0; m < 8; ++m) ops.push_back({kind, m});
  std::vector<RankMicroBatch> list(8, part_of(64));
  const StageWork deep{ops, list}, wide{kOnce, {part_of(200)}};
  for (const OpKind kind : {OpKind::forward, OpKind::backward}) ops.push_back({kind, 8});
  list.push_back(part_of(200));
  const StageWork step{ops, list};
  const auto run = [](const std::vector<StageWork>& steps) {
    return replay_run(small_stage(), steps).total();
  };
  EXPECT_LT(run({step}), replay_memory(small_stage(), step).total());
  EXPECT_EQ(run({step}), run({deep, wide}));
  EXPECT_EQ(run({step, step}), replay_memory(small_stage(), step).total());
  EXPECT_GT(run({wide, deep}), run({deep, wide}));
  EXPECT_EQ(run({deep, wide, wide}), run({step}));
  // Evaluations count for the steps behind them alone.
  const StageWork evaluation{{{OpKind::forward}}, {part_of(300)}};
  const auto evaluated = [&](std::size_t steps, std::int64_t every) {
    const std::vector<StageWork> list(steps, deep);
    return replay_run(small_stage(), list, {{evaluation, {every, every}}}).total();
  };
  EXPECT_EQ(evaluated(1, 1), run({deep}));
  EXPECT_EQ(evaluated(2, 2), run({deep}));
  EXPECT_EQ(evaluated(3, 2), replay_memory(small_stage(), deep, {{evaluation, {}}}).total());
  EXPECT_EQ(evaluated(2, 1), evaluated(3, 2));
  EXPECT_GT(evaluated(2, 1), run({deep}));
  // Drift is measured after the first step already; both may come between steps.
  const ForwardPasses drift{{{{OpKind::forward}}, {part_of(400)}}, {1, 5}};
  EXPECT_EQ(replay_run(small_stage(), {deep}, {drift}).total(), run({deep}));
  EXPECT_GT(replay_run(small_stage(), {deep, deep}, {{evaluation, {2, 2}}, drift}).total(),
            evaluated(3, 2));
}

TEST(MemoryReplay, StepsShareThePoolThatTheLargestOfThemGrew) {
  // One long micro-batch at a time, or many short ones at once.
  std::vector<Op> many;
  for (const OpKind kind : {OpKind::forward, OpKind::backward})
    for (int m = 0; m < 8; ++m) many.push_back({kind, m});
  const MemoryEstimate wide = replay_memory(small_stage(), {kOnce, {part_of(200)}}),
                       deep = replay_memory(small_stage(),
                                            {many, std::vector<RankMicroBatch>(8, part_of(64))});
  ASSERT_GT(wide.pool_bytes, deep.pool_bytes);
  ASSERT_GT(deep.peak_bytes, wide.peak_bytes);
  for (const bool first : {false, true}) {
    MemoryEstimate both = first ? wide : deep;
    both.take_larger(first ? deep : wide);
    EXPECT_EQ(both.peak_bytes, deep.peak_bytes + wide.pool_bytes - deep.pool_bytes);
    EXPECT_EQ(both[MemoryCategory::activations], deep[MemoryCategory::activations]);
  }
  MemoryEstimate twice = deep;
  twice.take_larger(deep);
  EXPECT_EQ(twice.peak_bytes, deep.peak_bytes);
  EXPECT_EQ(twice.bytes, deep.bytes);
}

TEST(MemoryReplay, TheTotalIsOfOneMoment) {
  const MemoryEstimate peak = replay_memory(small_stage(), {kOnce, {part_of(64)}});
  std::int64_t sum = 0;
  for (const std::int64_t bytes : peak.bytes) sum += bytes;
  EXPECT_LE(peak.peak_bytes, sum);
  EXPECT_GT(peak.peak_bytes, sum / 2);
}

TEST(MemoryReplay, OnlyAGpuHoldsAContext) {
  StageMemory stage = small_stage();
  MemoryEstimate found = replay_memory(stage, {kOnce, {part_of(64)}});
  EXPECT_EQ(found.context_bytes, kContextBytes);
  EXPECT_EQ(found.total(), found.peak_bytes + kContextBytes);
  stage.host = true;
  found = replay_memory(stage, {kOnce, {part_of(64)}});
  EXPECT_EQ(found.total(), found.peak_bytes);
}

TEST(MemoryReplay, BytesReadWell) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(640), "640 B");
  EXPECT_EQ(bytes_text(1 << 20), "1.00 MiB");
  EXPECT_EQ(bytes_text(12.0 * (1 << 20)), "12.0 MiB");
  EXPECT_EQ(bytes_text(141.0 * (1 << 30)), "141 GiB");
}

}  // namespace
}  // namespace ballast
