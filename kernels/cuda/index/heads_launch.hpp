// Patterns that differ by head on the GPU: pooled scores, the online choice between blocks and
// slashes, and static rules put into the form that slashes and columns are selected from.  Slots
// and pattern blocks of 64 keys are the same blocks here.  All pointers on the device.
#pragma once
#include "kernels/cuda/index/block_launch.hpp"
#include "kernels/cuda/index/slash_launch.hpp"

namespace ballast::cuda {

/// scores [q_heads, blocks, width] f32: of every block of 64 queries b and pattern block first[b] +
/// j up to its own, scale times the mean query of b times the mean key.  The others stay unwritten,
/// and so do those of padding.  Any width.
cudaError_t score_pooled(const Routing& x, float scale, float* scores, cudaStream_t stream);

/// What the online choice compares, once mass and means are those of all ranks.
struct Likeness {
  const void* q = nullptr;  ///< bf16 [64 tiles, q_heads, head_dim], as in Observation
  const std::int32_t* segment_tile = nullptr;  ///< [segments + 1] tiles of a segment
  const Interval* tile_rows = nullptr;         ///< [tiles] observed rows of a tile
  const void* high = nullptr;                  ///< of mean_keys(): [slots, kv_heads, head_dim]
  const void* low = nullptr;
  const std::int64_t* columns = nullptr;  ///< [q_heads, 64 slots] of observe_mass()
  int q_heads = 0, kv_heads = 0, head_dim = 0;
  int widest = 0;  ///< slots of the longest segment, at most kMostScoredBlocks
  float scale = 0;
};
/// by_blocks [q_heads, slots], zeroed by the caller: 1 at the first slot of each segment where
/// divergence() (core/plan/attention/head_rules.hpp) of the softmax of mean query times mean keys
/// and of the columns' mass by block is below `threshold`.  Not of whole or unobserved segments.
cudaError_t compare_estimates(const Likeness& x, const PatternAxes& axes, double threshold,
                              std::uint8_t* by_blocks, cudaStream_t stream);

/// What a head's static rule leaves of its mass.
struct StaticRule {
  std::int32_t kind = 0;  ///< 0: the mass as it is; 1: all slashes; 2: a window and a sink; 3: none
  std::int32_t window = 0;  ///< blocks
  std::int32_t sink = 0;    ///< keys
};
/// mass: slashes [heads, slots], then columns [heads, 64 slots].  Of heads with another rule than 0
/// it becomes 1 on the slashes and columns of the rule and 0 on the others.  rules [heads].
cudaError_t impose_rules(std::int64_t* mass, int heads, const PatternAxes& axes,
                         const StaticRule* rules, cudaStream_t stream);
/// Empties the lists of heads that go by blocks, and their cuts.
cudaError_t empty_lists(const std::uint8_t* by_blocks, int heads, const PatternAxes& axes,
                        const PatternLists& lists, const ListCuts& cuts, cudaStream_t stream);

}  // namespace ballast::cuda
