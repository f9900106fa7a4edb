// The xattention pattern.
#pragma once
#include <functional>
#include <memory>

#include "kernels/attention/block_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {

/// XAttention: antidiagonal sums of every block of queries against every block of keys, in one ring
/// turn of K.
class XAttentionSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  /// Calls visit(shard, its keys) for every shard, each rank beginning with its own: one turn of K
  /// round a flat ring.
  void turn_keys(const Tensor& own, const std::function<void(int, const Tensor&)>& visit) const;
  std::unique_ptr<BlockScores> scores_;
  std::int64_t query_blocks_ = 0;  ///< on all ranks
};

}  // namespace ballast
