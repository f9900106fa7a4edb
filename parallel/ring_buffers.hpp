// Buffers that rings, Ulysses and KV stores lend out and take back: the steady state allocates nothing, over layers and micro-batches.
#pragma once
#include <cstdint>
#include <vector>

#include "core/tensor.hpp"

namespace ballast {

/// Lends buffers and takes them back.
class RingBuffers {
 public:
  /// A buffer on loan; returns to the pool with its last move.
  class Lease {
   public:
    Lease() = default;
    Lease(RingBuffers* pool, Tensor storage, const Shape& shape);
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    Tensor tensor;  ///< contiguous, contents undefined at first

   private:
    RingBuffers* pool_ = nullptr;
    Tensor storage_;
  };
  explicit RingBuffers(MemoryCategory category = MemoryCategory::communication) : category_(category) {}
  /// `capacity`: elements to allocate for when no free buffer fits `shape` (so that shards of all sizes share buffers).
  Lease take(const Shape& shape, DType type, Device& device, std::int64_t capacity = 0);

 private:
  MemoryCategory category_;
  std::vector<Tensor> free_;
};

}  // namespace ballast
