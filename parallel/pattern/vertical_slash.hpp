// The vertical_slash pattern.
#pragma once
#include <memory>

#include "kernels/attention/slash_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {

/// Gives `scores` the mass of all ranks under the observed queries, joined over the ring, and
/// returns those queries, or the last of them where it takes several turns.  Collective over it.
Tensor observe_rows(SlashScores& scores, const AttentionInputs& in, const RingJoin& ring);

/// MTraining Algorithm 1: the last queries of every segment go to the keys, column sums stay,
/// diagonal sums are joined; each rank sends its heaviest columns.
class VerticalSlashSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  /// Which segments (or stretches) are computed whole, and which rows choose for the others.
  SlashSetup setup() const;
  /// Puts sampled queries of each segment in place of its last ones, for a BudgetPolicy.
  void sample_rows(std::vector<SlashWindow>& windows) const;
  /// Whether this step's choices are stored: of samples that are not cut.
  bool records() const;
  /// Hands the recorder the choice.
  void record(int layer, int heads, const std::vector<SlashStretch>& chosen) const;
  std::unique_ptr<SlashScores> scores_;
};

}  // namespace ballast
