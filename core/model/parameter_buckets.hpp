// Buckets of parameters: neighbours whose gradients are reduced, and whose values are gathered, in
// one collective; every optimizer shard has its part of each bucket.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/model/parameter_table.hpp"

namespace ballast {

/// All trainable parameters in one bucket.
inline constexpr std::int64_t kOneBucket = std::numeric_limits<std::int64_t>::max();

/// Neighbours [first, last) of a stage's trainable parameters.
struct ParameterBucket {
  std::size_t first = 0, last = 0;
  std::int64_t elements = 0;
  /// Its gradients are final once backward has passed this layer, the first of the bucket: -1 for
  /// the embedding's, which come last; kHeadLayer where only the head's lie in it.
  std::int64_t final_at = -1;
};
inline constexpr std::int64_t kHeadLayer = std::numeric_limits<std::int64_t>::max();

/// The buckets of a stage's trainable parameters, in their order.  A layer, the embedding and the
/// head are never cut; from the last one on neighbours join while the gradients (4 bytes an
/// element) take at most `bytes`.
std::vector<ParameterBucket> parameter_buckets(const std::vector<Parameter>& trainable,
                                               std::int64_t bytes);

/// Elements [begin, end) of a stage's trainable parameters, back to back without padding, and where
/// the first of them lies in a tensor that holds a shard of them.
struct ShardRun {
  std::int64_t begin = 0, end = 0, at = 0;
  std::int64_t count() const { return end - begin; }
  bool operator==(const ShardRun&) const = default;
};

}  // namespace ballast
