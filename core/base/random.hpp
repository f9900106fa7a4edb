// Counter-based random numbers: a value depends on its key alone, never on which rank draws it or
// in which order.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/base/host_device.hpp"

namespace ballast {

/// Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words from a 64-bit key and a 128-bit
/// counter.
constexpr std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_high,
                                              std::uint64_t counter_low) {
  std::array<std::uint32_t, 4> c{
      static_cast<std::uint32_t>(counter_low), static_cast<std::uint32_t>(counter_low >> 32),
      static_cast<std::uint32_t>(counter_high), static_cast<std::uint32_t>(counter_high >> 32)};
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c[0],
                        b = std::uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

/// 64 random bits for (seed, stream, index).  `stream` tells uses apart: hash a name with
/// stream_of.
inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto w = philox(seed, stream, index);
  return (std::uint64_t{w[1]} << 32) | w[0];
}
/// Uniform in [0, 1), 53 bits.
inline double random_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1.0p-53;
}
/// Standard normal by Box-Muller from one counter.
BALLAST_HOST_DEVICE inline double random_normal(std::uint64_t seed, std::uint64_t stream,
                                                std::uint64_t index) {
  const auto w = philox(seed, stream, index);
  const double u = ((std::uint64_t{w[1]} << 21) ^ (w[0] >> 11)) * 0x1.0p-53 + 0x1.0p-54;
  const double v = ((std::uint64_t{w[3]} << 21) ^ (w[2] >> 11)) * 0x1.0p-53;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}
/// FNV-1a of a name, to derive a stream.
constexpr std::uint64_t stream_of(const char* text, std::uint64_t hash = 14695981039346656037ull) {
  return *text == 0
             ? hash
             : stream_of(text + 1, (hash ^ static_cast<unsigned char>(*text)) * 1099511628211ull);
}

}  // namespace ballast
