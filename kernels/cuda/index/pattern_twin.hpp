// The device twin of a pattern: what CUDA attention reads.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"
#include "kernels/cuda/index/device_index.hpp"
#include "kernels/cuda/index/routed_index.hpp"

namespace ballast::cuda {

/// Device arrays of a pattern for calls with index.shape's numbers of heads.
struct PlacedIndex {
  DeviceIndex index;
  Tensor buffer;
  /// Null, or further pairs (AttentionForwardArgs::routed).
  std::shared_ptr<const RoutedWork> routed;
  std::vector<Tensor> shared;  ///< further arrays that these point to, of several twins
};

/// The buffer of an index of this shape, held_bytes() of it.  Error: more pairs of blocks than the
/// offsets of its transposed lists, which have 32 bits, can tell apart.
Tensor index_memory(const IndexShape& shape, Device& device);

class PatternTwin final : public DevicePattern {
 public:
  PatternTwin(PatternCounts counts, PlacedIndex placed)
      : DevicePattern(std::move(counts)), placed_(std::move(placed)) {}
  const PlacedIndex& placed() const { return placed_; }
  const DeviceIndex& index() const { return placed_.index; }

 private:
  PlacedIndex placed_;
};

}  // namespace ballast::cuda
