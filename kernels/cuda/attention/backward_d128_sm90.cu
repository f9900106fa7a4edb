// Attention backward on Hopper at head dim 128.
#include "kernels/cuda/attention/backward_sm90.cuh"

namespace ballast::cuda {

cudaError_t backward_d128(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                          cudaStream_t stream) {
  return launch_backward<128>(maps, p, dq, stream);
}

}  // namespace ballast::cuda
