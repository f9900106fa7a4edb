// Layers over stages: the slowest stage is as fast as any split allows; the stages' tables tile the
// model's.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "core/model/presets.hpp"
#include "core/plan/pipeline/stage_balance.hpp"

namespace ballast {
namespace {

double slowest(const std::vector<std::int64_t>& begin, std::int64_t layers, const PartCosts& c) {
  double most = 0;
  for (std::size_t s = 0; s < begin.size(); ++s) {
    const std::int64_t end = s + 1 < begin.size() ? begin[s + 1] : layers;
    most = std::max(most, c.layer * static_cast<double>(end - begin[s]) +
                              (s == 0 ? c.embedding : 0) + (s + 1 == begin.size() ? c.head : 0));
  }
  return most;
}

/// Least slowest stage over all splits.
double best(std::vector<std::int64_t>& begin, int stages, std::int64_t layers, const PartCosts& c) {
  if (static_cast<int>(begin.size()) == stages) return slowest(begin, layers, c);
  double least = 1e300;
  for (std::int64_t next = begin.back() + 1; next < layers; ++next) {
    begin.push_back(next);
    least = std::min(least, best(begin, stages, layers, c));
    begin.pop_back();
  }
  return least;
}

TEST(PipelineStages, NoSplitIsFaster) {
  for (std::int64_t layers = 1; layers <= 9; ++layers)
    for (int stages = 1; stages <= std::min<int>(4, static_cast<int>(layers)); ++stages)
      for (const PartCosts& c : {PartCosts{1, 0, 0}, {1, 0.1, 2.5}, {1, 3, 0.5}, {2, 0, 31}}) {
        const auto begin = balance_stages(layers, stages, c);
        ASSERT_EQ(begin.size(), static_cast<std::size_t>(stages));
        EXPECT_EQ(begin.front(), 0);
        EXPECT_TRUE(std::adjacent_find(begin.begin(), begin.end(), std::greater_equal<>()) ==
                    begin.end());
        EXPECT_LT(begin.back(), layers);
        std::vector<std::int64_t> first{0};
        EXPECT_DOUBLE_EQ(slowest(begin, layers, c), best(first, stages, layers, c))
            << layers << " layers, " << stages << " stages";
      }
  EXPECT_THROW(balance_stages(3, 4, {}), Error);
  EXPECT_THROW(balance_stages(3, 0, {}), Error);
}

TEST(PipelineStages, AHeavyHeadTakesLayersFromTheLastStage) {
  // Qwen2.5-0.5B at short context: the head is worth about nine layers.
  const auto begin = balance_stages(24, 4, part_costs(model_preset("qwen2.5-0.5b"), 1024));
  EXPECT_LT(24 - begin[3], 3);
  EXPECT_GE(24 - begin[3], 1);
  // Attention over a long context makes it light.
  EXPECT_GT(24 - balance_stages(24, 4, part_costs(model_preset("qwen2.5-0.5b"), 131072))[3], 3);
}

TEST(PipelineStages, ShareOfWeightGradients) {
  ModelShape shape = model_preset("qwen2.5-0.5b");
  EXPECT_EQ(weight_share(shape), 0.5);
  // One adapter on down_proj: of its backward, products with W (frozen) and with B and A towards
  // the input, and two for B and A themselves.
  shape.lora.rank = 8;
  shape.lora.projections = {Projection::down};
  const double h = shape.hidden, i = shape.intermediate, q = shape.query_heads * shape.head_dim,
               kv = shape.kv_heads * shape.head_dim;
  const double frozen = h * (q + 2 * kv) + q * h + 3 * h * i, adapter = 8 * (h + i);
  EXPECT_NEAR(weight_share(shape), adapter / (frozen + 2 * adapter), 1e-12);
}

TEST(PipelineStages, TablesTileTheModels) {
  for (const bool tied : {false, true}) {
    ModelShape shape = model_preset("qwen2.5-0.5b");
    shape.tied_embedding = tied;
    const std::vector<std::int64_t> begin =
        balance_stages(shape.layers, 3, part_costs(shape, 4096));
    std::int64_t at = 0, all = 0;
    for (int s = 0; s < 3; ++s) {
      const StageTable stage = stage_table(shape, begin, s);
      EXPECT_EQ(stage.begin, at);
      for (const Parameter& p : stage.table) {
        EXPECT_EQ(p.stage, s);
        at += p.numel();
        if (!p.tied_copy) all += p.numel();
        EXPECT_TRUE(!p.tied_copy || &p == &stage.table.back());
      }
    }
    EXPECT_EQ(all, shape.parameters());
  }
}

}  // namespace
}  // namespace ballast
