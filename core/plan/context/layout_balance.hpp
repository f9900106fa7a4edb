// How evenly a layout spreads a micro-batch over the ranks of a ring, what it makes attention
// compute beside visible pairs, and which layout costs least.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

/// Keys of a tile, which attention computes whole for a block of kBlock queries.
inline constexpr std::int64_t kKeyTile = 2 * kBlock;

/// Work of every rank under a layout.
struct LayoutBalance {
  std::vector<double> tokens, pairs;  ///< [rank]; visible pairs; padding is no token
  /// [rank] Pairs that tiles hold beside the visible ones because of the layout, on average: those
  /// at both ends of what a block of queries sees of a segment, which a ring step computes for each
  /// shard, and where two segments meet in a block.  A layout that deals whole tiles has none more
  /// than a rank that holds all.
  std::vector<double> rounding;
  /// What the fullest rank computes, tokens * token_pairs + pairs + rounding, over an even share of
  /// tokens * token_pairs + pairs; 1 without any.
  double cost(double token_pairs) const;
};

/// O(pieces + segments x ranks).
LayoutBalance balance(const MicroBatch& micro_batch, const SequenceLayout& layout);

/// What dense attention and patterns of blocks choose from: contiguous, document zigzag, stripes of
/// `stripe` tokens and of as many whole key tiles.
std::vector<LayoutRule> even_layouts(std::int64_t stripe, std::int64_t align);

/// The layout of each micro-batch: one rule for all, or the best of several.
struct LayoutChoice {
  /// LayoutKind::automatic takes the first of even_layouts that costs within 0.5 % of an even
  /// share, else the one that costs least; contiguous where there is no ring.
  LayoutRule rule;
  bool striped = false;  ///< automatic means stripes, which alone spread a slash over the ranks
  /// Visible pairs that take as long as the rest of one token; 0: attention alone counts.
  double token_pairs = 0;
  LayoutRule of(const MicroBatch& micro_batch, int ranks) const;
};

}  // namespace ballast
