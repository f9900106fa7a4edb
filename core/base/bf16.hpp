// bf16 on the host as its 16 bits, and what they are as fp32.
#pragma once
#include <bit>
#include <cstdint>

namespace ballast {

/// Rounded to nearest, ties to even; a NaN stays one.
constexpr std::uint16_t to_bf16_bits(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
constexpr float from_bf16_bits(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

}  // namespace ballast
