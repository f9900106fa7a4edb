// The rate that model FLOPs utilisation is relative to.
#pragma once

#include "core/base/tensor.hpp"

namespace ballast {

/// Dense matrix-product rate of one rank in FLOP/s, the base of MFU: measured with all ranks at
/// work on the host, of bf16 by the data sheet on a GPU (an A100's where the list lacks it).
double dense_peak_flops(const Device& device, DType type);

}  // namespace ballast
