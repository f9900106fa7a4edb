// MoBA over few blocks: a budget of every block is dense attention, and nothing else changes.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/block_scores.hpp"
#include "kernels/attention/index_scores.hpp"
#include "parallel/pattern/moba.hpp"
#include "tests/parallel/pattern/pattern_data.hpp"
#include "tests/parallel/pattern/stated_budget.hpp"
#include "tests/parallel/support.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kKeys = 128;  // of a block

class Moba : public ::testing::Test {
 protected:
  Communicator world = Communicator::world();
  SharedDraw draw{47};

  static AttentionOptions options_of_budget(std::int64_t top_k) {
    AttentionOptions options = options_of("moba");
    options.moba_block = kKeys;
    options.moba_top_k = top_k;
    return options;
  }
  /// Some segments, the longest of `blocks` blocks and at a block's edge or beside it.
  std::vector<std::int64_t> lengths(std::int64_t blocks) {
    std::vector<std::int64_t> list = {1, kKeys * (blocks - 1) + 1 + draw.integer(0, kKeys - 1)};
    for (const std::int64_t edge : {kKeys - 1, kKeys, kKeys + 1})
      if (edge <= blocks * kKeys) list.push_back(edge);
    list.push_back(blocks * kKeys);
    return list;
  }
  static bool dense(const std::vector<AttentionWork>& shards) {
    return std::all_of(shards.begin(), shards.end(),
                       [](const AttentionWork& w) { return w.host()->arrays().dense; });
  }
  /// The same choice by routing, as a larger budget alone would not be.
  static std::vector<AttentionWork> routed(const AttentionAxes& axes, const AttentionInputs& in,
                                           const Communicator& ring, std::int64_t budget) {
    const KeyAxis axis = key_axis(axes);
    const Tensor q = index_operand(in.q);
    const auto scores = block_scores(axes, axis, kKeys, q);
    Tensor sums = scores->pool(index_operand(in.k));
    if (ring.size() > 1) ring.all_reduce(sums, Reduction::sum);
    return scores->build(scores->route(q, scores->means(sums), in.scale, budget),
                         static_cast<int>(kHeads), static_cast<int>(kKvHeads), {budget, kDim});
  }
};

struct Passes {
  Tensor o, lse, dq, dk, dv;
};

/// Attention of one rank to its own keys.
Passes attend(const AttentionWork& work, const AttentionInputs& in, const Tensor& d_o) {
  const auto like = [](const Tensor& t) { return Tensor::zeros(t.shape(), t.dtype()); };
  Passes p{like(in.q), Tensor::zeros({kHeads, in.q.size(0)}, DType::f64), like(in.q), like(in.k),
           like(in.v)};
  Tensor delta = like(p.lse);
  attention_forward(work, in.q, in.k, in.v, in.scale, p.o, p.lse);
  attention_delta(p.o, d_o, delta);
  attention_backward(work, in.q, in.k, in.v, in.scale, p.lse, delta, d_o, p.dq, p.dk, p.dv);
  return p;
}

TEST_F(Moba, ABudgetOfEveryBlockIsDenseAttention) {
  SCOPED_TRACE(draw.trace());
  for (const std::int64_t blocks : {1, 2, 5}) {
    const AttentionOptions options = options_of_budget(blocks);
    const Data data(lengths(blocks), options, draw);
    const std::int64_t n = data.batch.axis_tokens();
    for (const LayoutCase& l : kLayouts) {
      const SequenceLayout layout(l.kind, n, world.size(), l.stripe, options.align());
      const AttentionAxes axes = attention_axes(data.batch, layout, world.rank());
      Recorder recorder;
      const auto source = pattern_source(world, axes, options, nullptr, &recorder);
      AttentionInputs in = data.inputs(data.packed(layout, world.rank()), DType::f64);
      const std::vector<AttentionWork> found = source->shards(in),
                                       expected = routed(axes, in, world, blocks);
      ASSERT_EQ(found.size(), expected.size());
      EXPECT_TRUE(dense(found));
      EXPECT_FALSE(dense(expected));
      double pairs = 0;
      for (std::size_t s = 0; s < found.size(); ++s) {
        EXPECT_EQ(problems(found[s].host()->arrays()), "");
        EXPECT_EQ(found[s].pairs_per_head(), expected[s].pairs_per_head());
        pairs += found[s].pairs_per_head();
      }
      EXPECT_EQ(world.all_reduce(pairs), data.batch.attention_pairs());
      // A row a head, as of a choice.
      const std::vector<BudgetRow> rows = recorder.take_budgets();
      ASSERT_EQ(rows.size(), static_cast<std::size_t>(kHeads));
      for (int h = 0; h < kHeads; ++h) {
        EXPECT_EQ(rows[h].head, h);
        EXPECT_EQ(rows[h].budget, blocks);
        EXPECT_EQ(rows[h].computed_pairs, rows[h].visible_pairs);
        EXPECT_EQ(rows[h].overflow, 0);
      }
      const Tensor d_o =
          data.rows(data.all.d_o, kHeads, data.packed(layout, world.rank()), DType::f64);
      if (in.q.size(0) == 0) continue;
      const auto own = static_cast<std::size_t>(world.rank());
      const Passes a = attend(found[own], in, d_o), b = attend(expected[own], in, d_o);
      EXPECT_LT(testing::relative_error(testing::elements(a.o), testing::elements(b.o)), 1e-14);
      EXPECT_LT(testing::relative_error(testing::elements(a.dq), testing::elements(b.dq)), 1e-14);
      EXPECT_LT(testing::relative_error(testing::elements(a.dk), testing::elements(b.dk)), 1e-14);
      EXPECT_LT(testing::relative_error(testing::elements(a.dv), testing::elements(b.dv)), 1e-14);
      in.layer = 5;
      EXPECT_EQ(source->shards(in).front().host()->arrays().visible.ranges().data(),
                found.front().host()->arrays().visible.ranges().data())
          << "one pattern for all layers";
    }
  }
}

TEST_F(Moba, OneLongerSegmentIsRouted) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of_budget(3);
  const Data data({100, 3 * kKeys + 1, 70}, options, draw);
  const SequenceLayout layout(LayoutKind::zigzag, data.batch.axis_tokens(), world.size(), 64,
                              options.align());
  const auto source = pattern_source(world, attention_axes(data.batch, layout, world.rank()),
                                     options, nullptr, nullptr);
  const auto& shards = source->shards(data.inputs(data.packed(layout, world.rank()), DType::f32));
  EXPECT_FALSE(dense(shards));
  double pairs = 0;
  for (const AttentionWork& shard : shards) pairs += shard.pairs_per_head();
  EXPECT_EQ(world.all_reduce(pairs), data.batch.attention_pairs() - kKeys)
      << "the last token leaves one of three earlier blocks";
}

TEST_F(Moba, KeysOfAChunkCountItsPrefix) {
  AttentionAxes axes;
  axes.align = kBlock;
  axes.first_query = {2 * kKeys};
  axes.queries = {{0, 2 * kKeys, 64}};
  axes.keys = {AxisRanges{{0, 0, 2 * kKeys + 64}}};
  AttentionInputs in;
  in.q = Tensor::zeros({64, kHeads, kDim}, DType::f32);
  in.k = in.v = Tensor::zeros({2 * kKeys + 64, kKvHeads, kDim}, DType::f32);
  for (const std::int64_t budget : {2, 3}) {
    const auto source =
        pattern_source(Communicator(), axes, options_of_budget(budget), nullptr, nullptr);
    EXPECT_EQ(dense(source->shards(in)), budget == 3);
  }
}

TEST_F(Moba, TunedBudgetsOfEveryBlockAreDenseToo) {
  SCOPED_TRACE(draw.trace());
  const AttentionOptions options = options_of_budget(2);
  const Data data({4 * kKeys - 1, 90}, options, draw);
  const SequenceLayout layout(LayoutKind::striped, data.batch.axis_tokens(), world.size(), 64,
                              options.align());
  const AttentionAxes axes = attention_axes(data.batch, layout, world.rank());
  const AttentionInputs in = data.inputs(data.packed(layout, world.rank()), DType::f32);
  const auto source_of = [&](BudgetPolicy& policy) {
    return pattern_source(world, axes, options, &policy, nullptr, Communicator());
  };
  Stated some(4, {1, 3, 4, 9}), all(9, {4, 9}), few(3, {1, 3, 4, 9});
  EXPECT_TRUE(dense(source_of(some)->shards(in)));
  EXPECT_TRUE(dense(source_of(all)->shards(in)));
  EXPECT_FALSE(dense(source_of(few)->shards(in)));
  EXPECT_LT(some.coverage[1], 1);
  EXPECT_EQ(some.coverage[2], 1) << "what all of them hold without being scored";
  EXPECT_EQ(some.coverage, few.coverage);
  EXPECT_EQ(all.coverage, std::vector<double>(2, 1.0));
}

}  // namespace
}  // namespace ballast
