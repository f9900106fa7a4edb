// Attention forward on Hopper at head dim 128.
#include "kernels/cuda/attention/forward_sm90.cuh"

namespace ballast::cuda {

cudaError_t forward_d128(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                         cudaStream_t stream) {
  return launch_forward<128, 2>(a, scratch, stream);
}

}  // namespace ballast::cuda
