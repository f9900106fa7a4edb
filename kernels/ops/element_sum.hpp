// Sums that tell whether stored elements are the ones that were held: independent of the order and
// of how the elements were cut.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"

namespace ballast {

/// What one pass over elements finds.  Parts add up: sum modulo 2^64, counts.
struct ElementSum {
  std::uint64_t sum = 0;       ///< of mixed (index, bits) pairs
  std::int64_t nonfinite = 0;  ///< NaN or infinite elements
  std::int64_t negative = 0;   ///< elements below zero
  ElementSum& operator+=(const ElementSum& other) {
    sum += other.sum;
    nonfinite += other.nonfinite;
    negative += other.negative;
    return *this;
  }
};

/// Sum of `count` elements of f32, f64 or bf16 in host memory; the first one has the logical index
/// `first` in its array.  Each element adds mix(index, bits), where mix spreads every bit of both
/// over all 64: an element that is lost, altered or in another place changes the sum (chance of not
/// noticing: 2^-64).
ElementSum element_sum(const void* elements, DType type, std::int64_t first, std::int64_t count);

}  // namespace ballast
