// Which parameters Muon updates, their stored order, and who orthogonalises which matrix.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/model/muon_table.hpp"

namespace ballast {
namespace {

ModelShape shape_of(std::int64_t layers) {
  ModelShape shape;
  shape.layers = layers;
  shape.hidden = 64;
  shape.intermediate = 160;
  shape.query_heads = 4;
  shape.kv_heads = 2;
  shape.head_dim = 16;
  shape.vocabulary = 500;
  shape.qkv_bias = true;
  shape.tied_embedding = true;
  return shape;
}

std::vector<Parameter> trainable(const std::vector<Parameter>& table, int stage) {
  std::vector<Parameter> list;
  for (const Parameter& p : table)
    if (p.trainable && p.stage == stage) list.push_back(p);
  return list;
}

TEST(MuonTable, MatricesOfLayersComeFirstInTheirOrder) {
  const std::vector<Parameter> before = parameter_table(shape_of(4), {0, 2});
  std::vector<Parameter> after = before;
  order_for_muon(after);
  for (int stage = 0; stage < 2; ++stage) {
    const std::vector<Parameter> old = trainable(before, stage), now = trainable(after, stage);
    std::vector<std::string> expected;
    for (const bool matrices : {true, false})
      for (const Parameter& p : old)
        if ((p.shape.size() == 2 && p.name.find("layers") != std::string::npos) == matrices)
          expected.push_back(p.name);
    ASSERT_EQ(now.size(), expected.size());
    for (std::size_t i = 0; i < now.size(); ++i) EXPECT_EQ(now[i].name, expected[i]);
    const MuonWork work = MuonWork::of(now);
    EXPECT_EQ(work.matrices.size(), 2u * 7);
    EXPECT_EQ(work.elements, 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160));
    EXPECT_EQ(work.matrices[1].begin, 64 * 64);
    EXPECT_EQ(work.largest(), 64 * 160);
    EXPECT_EQ(work.widest(), 64);
  }
  EXPECT_TRUE(after.back().tied_copy) << "norms count a tied copy as the last parameter";
}

TEST(MuonTable, AdaptersAreMatricesAndTheBaseStaysInFront) {
  ModelShape shape = shape_of(2);
  shape.lora.rank = 4;
  std::vector<Parameter> table = parameter_table(shape), before = table;
  order_for_muon(table);
  for (std::size_t i = 0; i < table.size(); ++i) EXPECT_EQ(table[i].name, before[i].name);
  EXPECT_EQ(MuonWork::of(trainable(table, 0)).matrices.size(), 2u * 4 * 2);
}

TEST(MuonTable, EveryMatrixHasOneOwnerAndTheWorkIsEven) {
  std::vector<Parameter> table = parameter_table(shape_of(6));
  order_for_muon(table);
  const MuonWork work = MuonWork::of(table);
  std::int64_t all = 0;
  for (const Parameter& p : table) all += p.numel();
  double total = 0, largest = 0;
  for (const MuonMatrix& m : work.matrices) {
    total += m.flops(5);
    largest = std::max(largest, m.flops(5));
  }
  for (const int ranks : {1, 2, 3, 4, 8, 64}) {
    const std::int64_t block = (all + ranks - 1) / ranks;
    const MuonShards shards = muon_shards(work, block, ranks, 5);
    std::vector<double> flops(static_cast<std::size_t>(ranks), 0.0);
    std::vector<std::int64_t> lent(static_cast<std::size_t>(ranks), 0);
    for (std::size_t i = 0; i < work.matrices.size(); ++i) {
      const MuonMatrix& m = work.matrices[i];
      const auto owner = static_cast<std::size_t>(shards.owner[i]);
      flops.at(owner) += m.flops(5);
      for (std::int64_t e = m.begin; e < m.end(); ++e)
        lent[owner] += e / block != static_cast<std::int64_t>(owner);
    }
    EXPECT_EQ(lent, shards.lent) << ranks;
    EXPECT_NEAR(std::accumulate(flops.begin(), flops.end(), 0.0), total, 1e-6 * total);
    EXPECT_DOUBLE_EQ(*std::max_element(flops.begin(), flops.end()), shards.busiest());
    EXPECT_LE(shards.busiest(), total / ranks + largest) << ranks;
    if (ranks == 1) EXPECT_EQ(shards.most_lent(), 0);
    const std::vector<MuonShare> shares = muon_shares(work, block, shards, DType::f32);
    ASSERT_EQ(shares.size(), lent.size());
    std::int64_t elements = 0;
    for (std::size_t r = 0; r < shares.size(); ++r) {
      elements += shares[r].elements;
      EXPECT_GE(shares[r].lent, lent[r]) << "whole matrices, of which others hold so much";
      EXPECT_EQ(shares[r].lent > 0, lent[r] > 0);
      EXPECT_EQ(shares[r].workspace_bytes > 0, flops[r] > 0) << "none without a matrix";
      EXPECT_LE(shares[r].workspace_bytes, work.workspace_bytes(DType::f32));
    }
    EXPECT_EQ(elements, work.elements) << ranks;
    const MuonShare most = heaviest(shares);
    EXPECT_EQ(most.workspace_bytes, work.workspace_bytes(DType::f32)) << "of the largest matrix";
    EXPECT_EQ(most.elements, shares.back().elements) << "AdamW's elements come last";
  }
}

TEST(MuonTable, FlopsAreThoseOfThreeProductsAStep) {
  const MuonMatrix m{0, 300, 20};  // the Gram matrix is 20 x 20
  EXPECT_DOUBLE_EQ(m.flops(2), 2.0 * (2 * 20 * 20 * 300 + 2 * 20 * 20 * 20 + 2 * 20 * 20 * 300));
}

}  // namespace
}  // namespace ballast
