// BudgetPolicy: who decides the attention budget of a layer at run time.  Index builders of
// budgeted patterns (moba, vertical_slash) ask it, with the coverage that their routing scores
// give; dynamic sparsity tuning (core/predict/sparsity_tuning.hpp) answers.  Source: SparseBalance
// Algorithm 1.
#pragma once
#include <cstdint>
#include <span>

#include "core/base/enum_names.hpp"

namespace ballast {

/// What the predicted latencies of micro-batches are aligned to (SparseBalance Equation 3).  path:
/// the mean for those above it; those below gain only what the simulated step does not feel.
enum class Anchor { mean, min, max, path };
template <>
struct EnumNames<Anchor> {
  static constexpr EnumTable<Anchor, 4> table{
      {{Anchor::mean, "mean"}, {Anchor::min, "min"}, {Anchor::max, "max"}, {Anchor::path, "path"}}};
};

/// What the largest drop of coverage bounds: each layer's (SparseBalance Equation 5), or the mean
/// over the layers of a stage, so that those whose coverage is flat give more.
enum class CoverageBound { layer, stage };
template <>
struct EnumNames<CoverageBound> {
  static constexpr EnumTable<CoverageBound, 2> table{
      {{CoverageBound::layer, "layer"}, {CoverageBound::stage, "stage"}}};
};

/// One object a micro-batch.  Every rank that shares the micro-batch holds an equal one and gets
/// equal coverage, so all decide alike without exchanging anything.
class BudgetPolicy {
 public:
  virtual ~BudgetPolicy() = default;
  /// Budgets that may be chosen, ascending, in the pattern's unit: key blocks a query, own block
  /// included (moba); 64-key blocks a query row, sink and own block and columns / 64 included
  /// (vertical_slash).  The same for every layer.
  virtual std::span<const std::int64_t> candidates() const = 0;
  /// Budget of `layer`, one of the candidates.  coverage[i] = C(candidates()[i]) (Equation 4): the
  /// mean, over all queries and heads of the micro-batch on all its ranks, of the softmax mass of
  /// the k highest routing logits (moba; scaled by 1 / sqrt(D), visible blocks only; of the queries
  /// that CoverageRows names), or of the observed queries' attention on the pairs that the budget's
  /// pattern computes (vertical_slash: SlashPurchases).  Called once for each layer and forward; a
  /// recomputation reuses the stored index and does not ask again.
  virtual std::int64_t choose(int layer, std::span<const double> coverage) = 0;
};

/// One budget for every layer: what a tuned run is evaluated at.  Stateless, so that all
/// micro-batches may share it.
class FixedBudget final : public BudgetPolicy {
 public:
  explicit FixedBudget(std::int64_t budget) : budget_(budget) {}
  std::span<const std::int64_t> candidates() const override { return {&budget_, 1}; }
  std::int64_t choose(int, std::span<const double>) override { return budget_; }

 private:
  std::int64_t budget_;
};

}  // namespace ballast
