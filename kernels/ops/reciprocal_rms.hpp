// What RMSNorm scales by, over the rows of the residual stream and over heads alike.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/ops/host_view.hpp"

namespace ballast::host {

/// 1 / sqrt(mean(x^2) + eps) of n values.
template <class T>
T reciprocal_rms(const T* x, std::int64_t n, double eps) {
  const double squares = lane_sum<T>(n, [x](std::int64_t j) { return x[j] * x[j]; });
  return static_cast<T>(1.0 / std::sqrt(squares / static_cast<double>(n) + eps));
}

}  // namespace ballast::host
