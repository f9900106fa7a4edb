// SwiGLU of eight values, by the kernels that write it as it is and those that round it to FP8: the
// same expressions, so the same bits.  Quotients are within two units of fp32's last place.
#pragma once
#include "kernels/cuda/runtime/reduce.cuh"

namespace ballast::cuda {

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1 + __expf(-x)); }

/// silu(g) u
__device__ inline Pack8 swiglu_of(const Pack8& gate, const Pack8& up) {
  float g[8], u[8];
  unpack(gate, g);
  unpack(up, u);
#pragma unroll
  for (int j = 0; j < 8; ++j) g[j] = g[j] * sigmoid(g[j]) * u[j];
  return pack(g);
}

/// The product again, and the gradients of gate and up for its own.
struct SwigluGradients {
  Pack8 product, d_gate, d_up;
};
__device__ inline SwigluGradients swiglu_gradients(const Pack8& gate, const Pack8& up,
                                                   const Pack8& d_product) {
  float g[8], u[8], d[8], product[8];
  unpack(gate, g);
  unpack(up, u);
  unpack(d_product, d);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float s = sigmoid(g[j]), silu = g[j] * s;
    product[j] = silu * u[j];
    g[j] = d[j] * u[j] * s * (1 + g[j] * (1 - s));
    u[j] = d[j] * silu;
  }
  return {pack(product), pack(g), pack(u)};
}

}  // namespace ballast::cuda
