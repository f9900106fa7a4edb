// The moba pattern.
#pragma once
#include <memory>

#include "kernels/attention/block_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {

/// MoBA: keys pooled over blocks and joined; every query routes to its best blocks.
class MobaSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  std::unique_ptr<BlockScores> scores_;
};

}  // namespace ballast
