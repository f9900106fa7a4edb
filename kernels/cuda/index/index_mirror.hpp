// The device copy of an AttentionIndex, kept in AttentionIndex::mirror.
#pragma once
#include <memory>

#include "core/base/tensor.hpp"
#include "kernels/cuda/index/attention_index.hpp"

namespace ballast::cuda {

/// Device arrays of one AttentionIndex for calls with the given heads.
struct IndexMirror {
  Tensor buffer;
  std::shared_ptr<const void> shared;  ///< keeps arrays alive that several mirrors point to
  DeviceIndex index;
  int q_heads = 0, kv_heads = 0;
};

}  // namespace ballast::cuda
