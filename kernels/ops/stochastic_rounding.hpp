// Rounding of fp32 to bf16, up or down by chance, so that its expectation is the value: a sum of
// many small terms, such as a moment that decays slowly, does not stand still as it does when every
// sum goes to the nearest.  Shared by host and GPU, which round alike.
#pragma once
#include <cstdint>

#include "core/base/host_device.hpp"

namespace ballast {

/// 32 random bits of element `index` under a key: a bijection of 32 bits that spreads every bit
/// (multiply and xor-shift; constants of C. Wellons' hash prospector, 0.11 % bias at most).
BALLAST_HOST_DEVICE constexpr std::uint32_t rounding_bits(std::uint32_t key, std::int64_t index) {
  std::uint32_t x = static_cast<std::uint32_t>(index) ^ key ^
                    static_cast<std::uint32_t>(index >> 32) * 0x9E3779B9u;
  x = (x ^ x >> 16) * 0x21F0AAADu;
  x = (x ^ x >> 15) * 0xD35A2D97u;
  return x ^ x >> 15;
}

/// The key of a training step's rounding: steps that follow each other have unlike ones.
constexpr std::uint32_t rounding_key(std::int64_t step) { return rounding_bits(0x5EED5EEDu, step); }

/// The bf16 that 16 random bits make of the fp32 with bits `x`: away from zero where they exceed
/// what is cut off.  A bf16 stays what it is; what is not finite is cut, and a NaN keeps a bit.
BALLAST_HOST_DEVICE constexpr std::uint16_t round_by_chance(std::uint32_t x, std::uint32_t random) {
  constexpr std::uint32_t kExponent = 0x7F800000u;
  if ((x & kExponent) == kExponent)
    return static_cast<std::uint16_t>(x >> 16 | ((x & 0x7FFFFFu) != 0 ? 0x40u : 0u));
  return static_cast<std::uint16_t>((x + (random & 0xFFFFu)) >> 16);
}

}  // namespace ballast
