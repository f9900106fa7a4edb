// Attention backward on Hopper at head dim 96.
#include "kernels/cuda/attention/backward_sm90.cuh"

namespace ballast::cuda {

cudaError_t backward_d96(const BackwardMaps& maps, const BackwardParams& p, QueryGradient dq,
                         cudaStream_t stream) {
  return launch_backward<96>(maps, p, dq, stream);
}

}  // namespace ballast::cuda
