// How evenly a layout spreads a micro-batch over the ranks of a ring, and which layout spreads it
// best.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

/// Visible (query, key) pairs of the queries at packed positions [begin, end); padding sees none.
double visible_pairs(const MicroBatch& micro_batch, const PackedAxis& axis, std::int64_t begin,
                     std::int64_t end);

/// Work of every rank under a layout.
struct LayoutBalance {
  std::vector<double> tokens, pairs;  ///< [rank]; padding is no token
  /// max / mean over ranks of tokens * token_pairs + pairs; 1 without any.
  double imbalance(double token_pairs) const;
};

/// O(pieces + segments x ranks).
LayoutBalance balance(const MicroBatch& micro_batch, const SequenceLayout& layout);

/// The layout of each micro-batch: one rule for all, or the most even of several.
struct LayoutChoice {
  LayoutRule rule;
  /// LayoutKind::automatic takes the first of these that is even within 0.1 %, else the most even;
  /// contiguous where there is no ring.
  std::vector<LayoutKind> kinds{LayoutKind::contiguous, LayoutKind::document_zigzag,
                                LayoutKind::striped};
  /// Visible pairs that take as long as the rest of one token; 0: attention alone counts.
  double token_pairs = 0;
  LayoutRule of(const MicroBatch& micro_batch, int ranks) const;
};

}  // namespace ballast
