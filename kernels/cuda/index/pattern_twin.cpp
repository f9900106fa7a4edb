#include "kernels/cuda/index/pattern_twin.hpp"

#include <cstdint>
#include <limits>

#include "core/base/error.hpp"
#include "kernels/cuda/index/uploads.hpp"

namespace ballast::cuda {

Tensor index_memory(const IndexShape& shape, Device& device) {
  require(
      shape.block_pairs <= std::numeric_limits<std::int32_t>::max(),
      "sparse attention on CUDA: {} pairs of a block of {} queries and one of as many keys over "
      "the {} query heads of a rank, at most 2^31 - 1; choose fewer, or divide heads or queries "
      "among more ranks (mesh.sp, mesh.cp_inner)",
      shape.block_pairs, kBlock, shape.q_heads);
  return workspace({static_cast<std::int64_t>(held_bytes(shape))}, DType::u8, device);
}

}  // namespace ballast::cuda
