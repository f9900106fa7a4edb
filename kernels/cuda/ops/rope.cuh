// Rotation of a pair (a, b) by the angle of cosine c and sine s: the same roundings wherever it is
// done.
#pragma once
#include <cuda_runtime.h>

namespace ballast::cuda {

__device__ inline float turned_low(float a, float b, float c, float s) {
  return __fmaf_rn(a, c, -__fmul_rn(b, s));
}
__device__ inline float turned_high(float a, float b, float c, float s) {
  return __fmaf_rn(b, c, __fmul_rn(a, s));
}

}  // namespace ballast::cuda
