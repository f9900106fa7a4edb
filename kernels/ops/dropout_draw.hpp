// How dropout draws which elements stay, for host and device code.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/base/host_device.hpp"
#include "core/base/random.hpp"

namespace ballast {

/// Eight neighbouring columns share one draw of 128 bits, as drawing takes longer on a GPU than
/// memory does; a column stays when its 16 bits are at least this.
constexpr int kDropoutColumns = 8;
inline std::uint32_t dropout_threshold(double rate) {
  return std::min(65535u, static_cast<std::uint32_t>(rate * 65536 + 0.5));
}
/// The share of elements that stay: 1 - rate in steps of 2^-16; its inverse is the scale that keeps
/// the mean.
inline double dropout_kept(double rate) { return 1 - dropout_threshold(rate) / 65536.0; }
BALLAST_HOST_DEVICE inline bool dropout_stays(const std::array<std::uint32_t, 4>& drawn, int column,
                                              std::uint32_t threshold) {
  return (drawn[static_cast<std::size_t>(column / 2)] >> (16 * (column % 2)) & 0xffff) >= threshold;
}

}  // namespace ballast
