// First values of parameters.
#pragma once
#include <cstdint>

#include "core/base/tensor.hpp"

namespace ballast {

/// out[i] = std * random_normal(seed, stream, i) (core/base/random.hpp), drawn in fp64.  `out` is
/// contiguous: f32 or f64 on the host; bf16, rounded from the host's f32, on a GPU.
void fill_normal(Tensor& out, double std, std::uint64_t seed, std::uint64_t stream);

}  // namespace ballast
