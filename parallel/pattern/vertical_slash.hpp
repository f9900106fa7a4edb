// The vertical_slash pattern.
#pragma once
#include <memory>

#include "kernels/attention/slash_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {

/// MTraining Algorithm 1: the last queries of every segment go to the keys, column sums stay,
/// diagonal sums are joined; each rank sends its heaviest columns.
class VerticalSlashSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  /// Which segments are computed whole, and which rows of the others are observed.
  SlashSetup setup() const;
  void observe(const AttentionInputs& in);
  std::unique_ptr<SlashScores> scores_;
};

}  // namespace ballast
