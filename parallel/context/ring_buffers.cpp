#include "parallel/context/ring_buffers.hpp"

#include <algorithm>

namespace ballast {

RingBuffers::Lease::Lease(RingBuffers* pool, Tensor storage, const Shape& shape, Fence last)
    : busy(last), pool_(pool), storage_(std::move(storage)) {
  std::int64_t elements = 1;
  for (auto extent : shape) elements *= extent;
  tensor = storage_.rows(0, elements).reshape(shape);
}

RingBuffers::Lease& RingBuffers::Lease::operator=(Lease&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(storage_, other.storage_);
  std::swap(tensor, other.tensor);
  std::swap(busy, other.busy);
  return *this;
}

RingBuffers::Lease::~Lease() {
  if (pool_) pool_->free_.push_back({std::move(storage_), busy});
}

RingBuffers::Lease RingBuffers::take(const Shape& shape, DType type, Device& device,
                                     std::int64_t capacity) {
  std::int64_t elements = 1;
  for (auto extent : shape) elements *= extent;
  // The smallest free buffer that fits; else the largest that does not makes room for a new one.
  auto fits = free_.end(), small = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const Tensor& held = it->storage;
    if (held.dtype() != type || held.space() != device.space()) continue;
    if (held.numel() >= elements) {
      if (fits == free_.end() || held.numel() < fits->storage.numel()) fits = it;
    } else if (small == free_.end() || held.numel() > small->storage.numel()) {
      small = it;
    }
  }
  Tensor storage;
  Fence busy;
  if (fits != free_.end()) {
    storage = std::move(fits->storage);
    busy = fits->busy;
    free_.erase(fits);
  } else {
    if (small != free_.end()) {
      device.wait(small->busy, Queue::compute);  // whoever gets its memory may use it then
      free_.erase(small);
    }
    storage =
        Tensor::empty({std::max({elements, capacity, std::int64_t{1}})}, type, device, category_);
  }
  return Lease(this, std::move(storage), shape, busy);
}

}  // namespace ballast
