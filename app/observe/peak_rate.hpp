// The rate that model FLOPs utilisation is relative to.
#pragma once

#include "core/base/tensor.hpp"

namespace ballast {

/// Dense matrix-product rate of one rank in FLOP/s, the base of MFU: measured with all ranks at
/// work on the host.
double dense_peak_flops(const Device& device, DType type);

}  // namespace ballast
