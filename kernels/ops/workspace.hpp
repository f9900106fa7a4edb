// Named scratch buffers that outlive a call, so that passes over layers and micro-batches do not
// allocate anew.
#pragma once
#include <map>
#include <string>

#include "core/base/tensor.hpp"

namespace ballast {

class Workspace {
 public:
  explicit Workspace(Device& device) : device_(&device) {}
  /// The buffer of that name, grown when it is too small; contents undefined.  A second request for
  /// a name reuses the memory, so a name must not be in use twice at a time.
  Tensor take(const std::string& name, const Shape& shape, DType type) {
    std::int64_t elements = 1;
    for (auto extent : shape) elements *= extent;
    Tensor& buffer = buffers_[name];
    if (!buffer.defined() || buffer.dtype() != type || buffer.numel() < elements) {
      buffer = Tensor();  // frees before it allocates
      buffer = Tensor::empty({elements}, type, *device_, MemoryCategory::workspace);
    }
    return buffer.rows(0, elements).reshape(shape);
  }

 private:
  Device* device_;
  std::map<std::string, Tensor> buffers_;
};

}  // namespace ballast
