// Attention forward on Hopper: which kernel runs (forward_sm90.cuh), and the copy engine's maps.
#include "kernels/cuda/attention/launch.hpp"
#include "kernels/cuda/runtime/hopper.cuh"

namespace ballast::cuda {

cudaError_t hopper::make_tensor_map(CUtensorMap* map, const void* base, bool fp32, int head_dim,
                                    int heads, std::int64_t tokens, std::int64_t stride, int rows) {
  // The driver's encoder, found at run time so that nothing links against libcuda.
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      function = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const std::uint64_t bytes = fp32 ? 4 : 2;
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {head_dim * bytes, static_cast<cuuint64_t>(stride) * bytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / bytes), 1,
                             static_cast<cuuint32_t>(rows)};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult r =
      encode(map, fp32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
             const_cast<void*>(base), size, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t forward_sm90(const AttentionForwardArgs& a, const AttentionScratch& scratch,
                         cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:
      return forward_d64(a, scratch, stream);
    case 96:
      return forward_d96(a, scratch, stream);
    case 128:
      return forward_d128(a, scratch, stream);
    default:
      return forward_d256(a, scratch, stream);
  }
}

}  // namespace ballast::cuda
