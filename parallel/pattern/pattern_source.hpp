// Indexes chosen from Q and K by a sparse pattern (attention.pattern), over context-parallel ranks:
// only what decides the choice is joined, never K itself.  Sources: MTraining Algorithm 1
// (vertical_slash), MoBA (moba), XAttention (xattention), MInference (by_head), FlexPrefill
// (flexprefill).
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/plan/attention/attention_options.hpp"
#include "core/plan/attention/attention_pattern.hpp"
#include "core/plan/attention/budget_policy.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "core/plan/attention/index_source.hpp"
#include "core/plan/attention/vertical_slash.hpp"
#include "kernels/attention/slash_scores.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// What was chosen for one index head of a layer; the same on every rank.
struct HeadBudget {
  double budget = 0;  ///< vertical_slash: slashes + columns / 64; others: pattern blocks a query;
                      ///< mean over segments by queries
  std::int64_t overflow = 0;  ///< columns and slashes that the caps left out
  double overflow_mass = 0;  ///< share of the observed mass on them, mean like budget; NaN where it
                             ///< is not known
  std::optional<HeadPattern> kind = std::nullopt;  ///< where heads differ: of most of its queries
};

/// Builds a layer's index at its first forward and keeps it for the micro-batch.
class PatternSource : public IndexSource, protected RingJoin {
 public:
  /// `cp`: the ring's ranks; `sp`: those with the other heads of the same tokens (Ulysses).
  /// `policy` may be null: then the budgets are those of `options`.  `carry`: of the sample that a
  /// dependent chunk belongs to, else null.
  PatternSource(Communicator cp, Communicator sp, AttentionAxes axes,
                const AttentionOptions& options, BudgetPolicy* policy, Recorder* recorder,
                std::shared_ptr<SlashCarry> carry);
  const std::vector<AttentionWork>& shards(const AttentionInputs& in) final;
  bool reads_keys(int layer) const final { return layers_.count(layer) == 0; }

 protected:
  struct Built {
    std::vector<AttentionWork> shards;  ///< by call of the axes
    std::vector<HeadBudget> budgets;
  };
  virtual Built build(const AttentionInputs& in) = 0;
  /// [segments] queries of a segment on all ranks, of the first `told` of every 64.
  std::vector<std::int64_t> query_counts(int told = kBlock) const;
  std::vector<std::int64_t> candidates() const {
    return {policy_->candidates().begin(), policy_->candidates().end()};
  }
  /// Mean of the coverage at the policy's candidates over queries and heads.  sums: [candidates]
  /// i64, in kCoverageUnit, over query_counts(told) of all ranks of the ring and the `heads` here;
  /// sums over the heads of the other ranks.  Collective over `sp`.
  std::vector<double> mean_coverage(Tensor sums, std::int64_t heads, int told = kBlock) const;
  /// The policy's choice given the mean coverage at its candidates.
  std::int64_t choose(int layer, const std::vector<double>& coverage) const;
  /// Sums (maxima) a tensor over the ring's ranks.
  void join(Tensor& tensor, Reduction reduction) const { join(cp_, tensor, reduction); }

  const Communicator cp_, sp_;
  const AttentionOptions options_;
  BudgetPolicy* const policy_;
  Recorder* const recorder_;
  const KeyAxis axis_;
  const std::shared_ptr<SlashCarry> carry_;

 private:
  void sum(Tensor& tensor) const final { join(tensor, Reduction::sum); }
  void maximum(Tensor& tensor) const final { join(tensor, Reduction::max); }
  Tensor gather(const Tensor& mine) const final;
  void join(const Communicator& ranks, Tensor& tensor, Reduction reduction) const;
  /// Whether this forward of the layer is one that recall is measured in.
  bool observes_recall(int layer) const;
  std::map<int, std::vector<AttentionWork>> layers_;
};

/// The source of options.pattern.  `policy`, `sp` and `carry` are for patterns that look at Q and
/// K.
std::unique_ptr<IndexSource> pattern_source(const Communicator& cp, AttentionAxes axes,
                                            const AttentionOptions& options, BudgetPolicy* policy,
                                            Recorder* recorder, const Communicator& sp = {},
                                            std::shared_ptr<SlashCarry> carry = nullptr);

}  // namespace ballast
