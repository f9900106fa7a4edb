// Attention forward on Hopper at head dim 256.
#include "kernels/cuda/attention/forward_sm90.cuh"

namespace ballast::cuda {

cudaError_t forward_d256(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                         cudaStream_t stream) {
  return launch_forward<256, 2>(a, scratch, stream);
}

}  // namespace ballast::cuda
