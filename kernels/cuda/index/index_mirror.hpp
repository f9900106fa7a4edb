// The device copy of an AttentionPattern, kept in AttentionPattern::mirror.
#pragma once
#include <memory>

#include "core/base/tensor.hpp"
#include "kernels/cuda/index/device_index.hpp"

namespace ballast::cuda {

/// Device arrays of one AttentionPattern for calls with the given heads.
struct IndexMirror {
  Tensor buffer;
  std::shared_ptr<const void> shared;  ///< keeps arrays alive that several mirrors point to
  DeviceIndex index;
  int q_heads = 0, kv_heads = 0;
};

}  // namespace ballast::cuda
