// Dropout with counter-based masks: which elements stay depends on the token and the place alone,
// never on the mesh, the order of computation or a generator's state; so backward and recomputation
// draw the same mask again.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"
#include "kernels/ops/dropout_draw.hpp"

namespace ballast {

/// y [T, n] = (or with `accumulate` +=) scale x where the element stays, 0 elsewhere.  Element (t,
/// c) stays by (stream, keys[t], c) with probability dropout_kept(rate); `keys` [T] i64 names the
/// tokens; 0 < rate < 1.  Backward is the same call on the gradient.  y may be x; rows of both may
/// lie apart.
void dropout(const Tensor& x, const Tensor& keys, std::uint64_t stream, double rate, double scale,
             Tensor& y, bool accumulate = false);

}  // namespace ballast
