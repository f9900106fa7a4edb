// Small arrays on the GPU for the builders of patterns, and words of bits there.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/visible_keys.hpp"

namespace ballast::cuda {

inline Tensor workspace(Shape shape, DType type, Device& device) {
  return Tensor::empty(std::move(shape), type, device, MemoryCategory::workspace);
}

inline Tensor upload(const std::vector<std::int32_t>& values, Device& device) {
  return Tensor::wrap(const_cast<std::int32_t*>(values.data()),
                      {static_cast<std::int64_t>(values.size())}, DType::i32)
      .to(device);
}

inline std::uint64_t* words_of(const Tensor& bits) {
  return reinterpret_cast<std::uint64_t*>(bits.data<std::int64_t>());
}

/// The visible keys one a row, as the kernels read them.
inline void upload_rows(const VisibleKeys& visible, Device& device, Tensor& key_begin,
                        Tensor& key_end) {
  std::vector<std::int32_t> begin, end;
  visible.for_rows(0, visible.rows(), [&](std::int64_t, KeyInterval keys) {
    begin.push_back(keys.begin);
    end.push_back(keys.end);
  });
  key_begin = upload(begin, device);
  key_end = upload(end, device);
}

}  // namespace ballast::cuda
