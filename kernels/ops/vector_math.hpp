// Exponential that the compiler can vectorise.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace ballast::host {

/// e^x in fp32, relative error below 2e-7 on [-87, 88]; arguments beyond saturate there (0 is never
/// reached: e^-87 is 1.6e-38).  NaN stays NaN.  Polynomial after S. Moshier, Cephes library, expf.
inline float fast_exp(float x) {
  constexpr float magic =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that lies in the low mantissa bits
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const std::int32_t exponent =
      std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(magic);
  return p * std::bit_cast<float>((exponent + 127) << 23);
}
inline double fast_exp(double x) { return std::exp(x); }

}  // namespace ballast::host
