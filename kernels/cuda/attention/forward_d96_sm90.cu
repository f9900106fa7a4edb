// Attention forward on Hopper at head dim 96.
#include "kernels/cuda/attention/forward_sm90.cuh"

namespace ballast::cuda {

cudaError_t forward_d96(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                        cudaStream_t stream) {
  return launch_forward<96, 2>(a, scratch, stream);
}

}  // namespace ballast::cuda
