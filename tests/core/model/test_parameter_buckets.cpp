// Buckets of parameters: no layer is cut, none is larger than it need be, and each says when its
// gradients are final.
#include <gtest/gtest.h>

#include "core/model/muon_table.hpp"
#include "core/model/parameter_buckets.hpp"
#include "core/model/presets.hpp"
#include "tests/seed.hpp"

namespace ballast {
namespace {

std::vector<Parameter> of_stage(const std::vector<Parameter>& table, int stage) {
  std::vector<Parameter> part;
  for (const Parameter& p : table)
    if (p.stage == stage && p.trainable) part.push_back(p);
  return part;
}

/// What must hold of any cut.
void expect_sound(const std::vector<Parameter>& table, std::int64_t bytes) {
  const auto buckets = parameter_buckets(table, bytes);
  std::size_t next = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const ParameterBucket& bucket = buckets[b];
    ASSERT_EQ(bucket.first, next);
    ASSERT_LT(bucket.first, bucket.last);
    next = bucket.last;
    std::int64_t elements = 0, lowest = kHeadLayer;
    bool one_unit = true;
    for (std::size_t i = bucket.first; i < bucket.last; ++i) {
      elements += table[i].numel();
      one_unit = one_unit && table[i].layer == table[bucket.first].layer;
      if (table[i].layer >= 0) lowest = std::min(lowest, table[i].layer + std::int64_t{0});
    }
    const Parameter& first = table[bucket.first];
    if (first.layer < 0 && first.name == "model.embed_tokens.weight" && !first.tied_copy)
      lowest = -1;
    EXPECT_EQ(bucket.elements, elements);
    EXPECT_EQ(bucket.final_at, lowest);
    EXPECT_TRUE(one_unit || elements * 4 <= bytes) << "bucket " << b;
    if (b == 0) continue;
    EXPECT_NE(table[bucket.first - 1].layer, first.layer) << "a layer is cut";
    EXPECT_LT(buckets[b - 1].final_at, bucket.final_at);
  }
  EXPECT_EQ(next, table.size());
}

TEST(ParameterBuckets, HoldWholeLayersUpToALimit) {
  for (const char* preset : {"qwen2.5-0.5b", "llama3.1-8b"}) {
    ModelShape shape = model_preset(preset);
    for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{128} << 20,
                                     std::int64_t{1} << 30, std::int64_t{1} << 40, kOneBucket})
      for (const bool adapters : {false, true}) {
        shape.lora.rank = adapters ? 8 : 0;
        const auto table = parameter_table(shape, {0, shape.layers / 3, shape.layers / 2});
        for (int stage = 0; stage < 3; ++stage) expect_sound(of_stage(table, stage), bytes);
        if (!adapters) expect_sound(parameter_table(shape), bytes);
      }
  }
}

TEST(ParameterBuckets, SmallLimitsGiveALayerEach) {
  const ModelShape shape = model_preset("llama3.1-8b");
  const auto buckets = parameter_buckets(parameter_table(shape), 1);
  ASSERT_EQ(buckets.size(), static_cast<std::size_t>(shape.layers) + 2);  // embedding and head
  EXPECT_EQ(buckets.front().final_at, -1);
  EXPECT_EQ(buckets[5].final_at, 4);
  EXPECT_EQ(buckets.back().final_at, kHeadLayer);
  EXPECT_EQ(parameter_buckets(parameter_table(shape), kOneBucket).size(), 1u);
}

TEST(ParameterBuckets, MuonsOrderIsOneBucket) {
  ModelShape shape = model_preset("qwen2.5-0.5b");
  std::vector<Parameter> table = parameter_table(shape);
  order_for_muon(table);
  const auto buckets = parameter_buckets(table, kOneBucket);
  ASSERT_EQ(buckets.size(), 1u);
  EXPECT_EQ(buckets.front().last, table.size());
  EXPECT_EQ(buckets.front().final_at, -1) << "the embedding lies behind the matrices";
}

}  // namespace
}  // namespace ballast
