// The moba pattern.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "kernels/attention/block_scores.hpp"
#include "kernels/attention/placed_patterns.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {

/// MoBA: keys pooled over blocks and joined; every query routes to its best blocks.  A budget of
/// every block of every segment is dense attention: nothing is scored, and all layers share one
/// pattern.
class MobaSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  /// Whether so many blocks hold all keys of every segment, those on other ranks included.
  bool takes_all(std::int64_t budget) const;
  /// Mean keys of the blocks of all ranks.  Collective.
  Tensor means(const AttentionInputs& in);
  std::vector<AttentionWork> dense(const AttentionInputs& in);

  std::unique_ptr<BlockScores> scores_;  ///< once something is scored
  std::optional<PlacedPatterns> dense_;
};

}  // namespace ballast
