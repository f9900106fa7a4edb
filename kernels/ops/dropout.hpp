// Dropout with counter-based masks: which elements stay depends on the token and the place alone,
// never on the mesh, the order of computation or a generator's state; so backward and recomputation
// draw the same mask again.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"

namespace ballast {

/// y [T, n] = (or with `accumulate` +=) scale x where the element stays, 0 elsewhere.  Element (t,
/// c) stays with probability 1 - rate, by (stream, keys[t], c); `keys` [T] i64 names the tokens and
/// may be undefined with rate 0.  Backward is the same call on the gradient.  y may be x; rows of
/// both may lie apart.
void dropout(const Tensor& x, const Tensor& keys, std::uint64_t stream, double rate, double scale,
             Tensor& y, bool accumulate = false);

/// Four neighbouring columns share one draw; a column stays when its word is at least this.
inline std::uint32_t dropout_threshold(double rate) {
  return static_cast<std::uint32_t>(rate * 4294967296.0);
}

}  // namespace ballast
