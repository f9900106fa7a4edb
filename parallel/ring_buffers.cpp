#include "parallel/ring_buffers.hpp"

#include <algorithm>

namespace ballast {

RingBuffers::Lease::Lease(RingBuffers* pool, Tensor storage, const Shape& shape) : pool_(pool), storage_(std::move(storage)) {
  std::int64_t elements = 1;
  for (auto extent : shape) elements *= extent;
  tensor = storage_.rows(0, elements).reshape(shape);
}

RingBuffers::Lease& RingBuffers::Lease::operator=(Lease&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(storage_, other.storage_);
  std::swap(tensor, other.tensor);
  return *this;
}

RingBuffers::Lease::~Lease() {
  if (pool_) pool_->free_.push_back(std::move(storage_));
}

RingBuffers::Lease RingBuffers::take(const Shape& shape, DType type, Device& device, std::int64_t capacity) {
  std::int64_t elements = 1;
  for (auto extent : shape) elements *= extent;
  // The smallest free buffer that fits; else the largest that does not makes room for a new one.
  auto fits = free_.end(), small = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->dtype() != type || it->space() != device.space()) continue;
    if (it->numel() >= elements) {
      if (fits == free_.end() || it->numel() < fits->numel()) fits = it;
    } else if (small == free_.end() || it->numel() > small->numel()) {
      small = it;
    }
  }
  Tensor storage;
  if (fits != free_.end()) {
    storage = std::move(*fits);
    free_.erase(fits);
  } else {
    if (small != free_.end()) free_.erase(small);
    storage = Tensor::empty({std::max({elements, capacity, std::int64_t{1}})}, type, device, category_);
  }
  return Lease(this, std::move(storage), shape);
}

}  // namespace ballast
