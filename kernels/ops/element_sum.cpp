#include "kernels/ops/element_sum.hpp"

#include <cstring>

namespace ballast {
namespace {

/// splitmix64's finaliser over the bits, with the index spread over all 64 beforehand.
std::uint64_t mix(std::uint64_t index, std::uint64_t bits) {
  std::uint64_t x = bits + (index + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// `exponent` are the bits that are all set in what is not finite.
template <class Bits>
ElementSum sum_of(const void* elements, std::int64_t first, std::int64_t count, Bits exponent) {
  constexpr int kSign = 8 * sizeof(Bits) - 1;
  const auto* at = static_cast<const unsigned char*>(elements);
  ElementSum result;
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, at + static_cast<std::size_t>(i) * sizeof(Bits), sizeof(Bits));
    result.sum += mix(static_cast<std::uint64_t>(first + i), bits);
    result.nonfinite += (bits & exponent) == exponent;
    result.negative += (bits >> kSign) != 0 && static_cast<Bits>(bits << 1) != 0;
  }
  return result;
}

}  // namespace

ElementSum element_sum(const void* elements, DType type, std::int64_t first, std::int64_t count) {
  switch (type) {
    case DType::f32:
      return sum_of<std::uint32_t>(elements, first, count, 0x7F800000u);
    case DType::f64:
      return sum_of<std::uint64_t>(elements, first, count, 0x7FF0000000000000ull);
    case DType::bf16:
      return sum_of<std::uint16_t>(elements, first, count, 0x7F80u);
    default:
      fail("sums of {} elements are not defined", name(type));
  }
}

}  // namespace ballast
