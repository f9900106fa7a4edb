// Attention forward on Hopper at head dim 64.
#include "kernels/cuda/attention/forward_sm90.cuh"

namespace ballast::cuda {

cudaError_t forward_d64(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                        cudaStream_t stream) {
  return a.index->shape.dense ? launch_forward<64, 3>(a, scratch, stream)
                              : launch_forward<64, 2>(a, scratch, stream);
}

}  // namespace ballast::cuda
