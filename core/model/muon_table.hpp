// Which parameters Muon updates, in what order they are stored for it, and which rank
// orthogonalises which matrix.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/model/parameter_table.hpp"

namespace ballast {

/// A parameter that Muon updates: a trainable matrix of a layer (of its adapters too).  Embedding,
/// head, norms and biases stay with AdamW.
bool muon_updates(const Parameter& parameter);

/// Puts the trainable parameters that Muon updates before the other trainable ones, stage by stage;
/// otherwise the order stays, so that q, k, v and gate, up are neighbours still, frozen parameters
/// first and a tied copy last.
void order_for_muon(std::vector<Parameter>& table);

/// A matrix that is orthogonalised as a whole: q, k, v, o, gate, up and down each by itself, all
/// heads together.
struct MuonMatrix {
  std::int64_t begin = 0;  ///< first element among the trainable ones
  std::int64_t rows = 0, columns = 0;
  std::int64_t numel() const { return rows * columns; }
  std::int64_t end() const { return begin + numel(); }
  /// Of `steps` Newton-Schulz steps: two products of the shorter side's Gram matrix with the
  /// matrix's size, and one of the Gram matrix with itself.
  double flops(int steps) const;
};

/// What Muon does for the parameters of one stage.
struct MuonWork {
  std::vector<MuonMatrix> matrices;  ///< in stored order, the first trainable elements
  std::int64_t elements = 0;         ///< of the matrices; AdamW's follow
  /// Of a table in order_for_muon's order.
  static MuonWork of(const std::vector<Parameter>& trainable);
  std::int64_t largest() const;  ///< elements of the largest matrix
  std::int64_t widest() const;   ///< the longest of the matrices' shorter sides
  /// Of orthogonalise(): on a GPU in bf16, on the host in `type`.
  std::int64_t workspace_bytes(DType type) const;
};

/// The ranks over which equal ranges of `block` elements are spread (ZeRO 1), and whose matrix is
/// whose.
struct MuonShards {
  std::vector<int> owner;          ///< [matrix] rank that orthogonalises it
  std::vector<double> flops;       ///< [rank] of a step's products
  std::vector<std::int64_t> lent;  ///< [rank] elements of its matrices that others hold
  double busiest() const;          ///< the most of `flops`
  std::int64_t most_lent() const;  ///< the most of `lent`
};
/// Largest matrix first: to the rank that holds most of it while that rank has no more than its
/// even share of the products, else to the rank with the least so far.  The same on every rank.
MuonShards muon_shards(const MuonWork& work, std::int64_t block, int ranks, int steps);

/// What one of those ranks holds for Muon.
struct MuonShare {
  std::int64_t elements = 0;         ///< of the matrices, in its block: they have one moment
  std::int64_t workspace_bytes = 0;  ///< of the updates of its own matrices, for a moment
  std::int64_t lent = 0;             ///< elements of those that do not lie whole in its block
  auto operator<=>(const MuonShare&) const = default;
};
/// [rank]
std::vector<MuonShare> muon_shares(const MuonWork& work, std::int64_t block,
                                   const MuonShards& shards, DType type);
/// The most memory of each kind that one of them takes; of none: nothing.
MuonShare heaviest(const std::vector<MuonShare>& shares);

}  // namespace ballast
