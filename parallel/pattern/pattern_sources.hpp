// The patterns behind pattern_source(); one file each.
#pragma once
#include <functional>

#include "core/plan/context/axis_range.hpp"
#include "kernels/attention/index_scores.hpp"
#include "parallel/pattern/pattern_source.hpp"

namespace ballast {
namespace cuda {
class SlashBuilder;
class BlockBuilder;
}  // namespace cuda

/// MTraining Algorithm 1: the last queries of every segment go to the keys, column sums stay,
/// diagonal sums are joined; each rank sends its heaviest columns.
class VerticalSlashSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  Built build_on_gpu(const AttentionInputs& in);  ///< pattern_on_gpu.cpp
  std::shared_ptr<cuda::SlashBuilder> gpu_;
};

/// Pattern blocks of `block_tokens` on the key axis, numbered over all segments.
struct PatternBlocks {
  PatternBlocks(const KeyAxis& axis, std::int64_t block_tokens);
  /// Local blocks of 64 among them.
  PatternRows rows(const KeyAxis& axis, const std::vector<AxisToken>& tokens) const;
  std::int64_t block_tokens = 0;
  std::vector<std::int64_t> first;  ///< [segments + 1]
  std::int64_t count() const { return first.back(); }
  std::int64_t widest() const;  ///< blocks of the longest segment
};

/// MoBA: keys pooled over blocks and joined; every query routes to its best blocks.
class MobaSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  Built build_on_gpu(const AttentionInputs& in);  ///< pattern_on_gpu.cpp
  std::shared_ptr<cuda::BlockBuilder> gpu_;
};

/// XAttention: antidiagonal sums of every block of queries against every block of keys, in one ring
/// turn of K.
class XAttentionSource final : public PatternSource {
 public:
  using PatternSource::PatternSource;

 private:
  Built build(const AttentionInputs& in) override;
  Built build_on_gpu(const AttentionInputs& in);  ///< pattern_on_gpu.cpp
  /// Calls visit(shard, its keys) for every shard, each rank beginning with its own: one turn of K
  /// round a flat ring.
  void turn_keys(const Tensor& own, const std::function<void(int, const Tensor&)>& visit) const;
  std::shared_ptr<cuda::BlockBuilder> gpu_;
  std::int64_t query_blocks_ = 0;  ///< on all ranks
};

}  // namespace ballast
