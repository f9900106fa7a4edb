// Buffers that rings, Ulysses and KV stores lend out and take back: the steady state allocates
// nothing, over layers and micro-batches.
#pragma once
#include <cstdint>
#include <vector>

#include "core/base/tensor.hpp"

namespace ballast {

/// Lends buffers and takes them back.
class RingBuffers {
 public:
  /// A buffer on loan; returns to the pool with its last move.
  class Lease {
   public:
    Lease() = default;
    Lease(RingBuffers* pool, Tensor storage, const Shape& shape, Fence busy = {});
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();
    Tensor tensor;  ///< contiguous, contents undefined at first
    /// A copy that may still read or write the buffer: at first that of the last borrower, for
    /// which the queue that uses the buffer waits.  One that the borrower starts and nobody waits
    /// for while the loan lasts stands here when it ends.
    Fence busy;

   private:
    RingBuffers* pool_ = nullptr;
    Tensor storage_;
  };
  explicit RingBuffers(MemoryCategory category = MemoryCategory::communication)
      : category_(category) {}
  /// `capacity`: elements to allocate for when no free buffer fits `shape` (so that shards of all
  /// sizes share buffers).
  Lease take(const Shape& shape, DType type, Device& device, std::int64_t capacity = 0);

 private:
  struct Free {
    Tensor storage;
    Fence busy;
  };
  MemoryCategory category_;
  std::vector<Free>
      free_;  ///< in the order of their return, so that of equal ones the longest free is lent
};

}  // namespace ballast
