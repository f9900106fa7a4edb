// Device: where memory lives and how bytes move.  One implementation per backend (host here, CUDA in kernels/cuda).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ballast {

enum class Space { host, cuda };
enum class Backend { host, cuda };

/// What a piece of memory is for; peak bytes are kept per category (trace and `check`).  `offloaded` is state put away in host memory: totals
/// leave it out, because they say what the device of a run needs.
enum class MemoryCategory { parameters, gradients, optimizer, activations, communication, kv_store, workspace, data, offloaded };
inline constexpr int kMemoryCategories = 9;
const char* name(MemoryCategory category);

/// Allocation and transfer on one memory space.  Errors throw ballast::Error.
class Device {
 public:
  virtual ~Device() = default;
  virtual Space space() const = 0;
  virtual std::string description() const = 0;
  virtual void* allocate(std::size_t bytes) = 0;  ///< at least 64-byte aligned; 0 bytes gives nullptr
  virtual void deallocate(void* pointer, std::size_t bytes) noexcept = 0;
  virtual void zero(void* pointer, std::size_t bytes) = 0;
  /// Copies between this device and the host or within the device; ordered with this device's compute stream.
  virtual void copy(void* to, Space to_space, const void* from, Space from_space, std::size_t bytes) = 0;
  /// Returns when all queued work is done.
  virtual void synchronize() = 0;
  /// Copies between this device and memory of pinned_device(), ordered with the compute stream; the host does not wait.
  virtual void stream_copy(void* to, const void* from, std::size_t bytes) = 0;
  /// A mark behind the work queued so far, and the wait until that work is done: keeps the host from running far ahead.  The latest eight
  /// marks can be waited for.  The host queues nothing.
  virtual std::int64_t fence() { return 0; }
  virtual void wait(std::int64_t) {}
};

/// The host device: storage from Kokkos.  Kokkos must be initialised before the first allocation.
Device& host_device();
/// The CUDA device of this process, or nullptr when none was set up (see kernels/cuda).
Device* cuda_device();
void set_cuda_device(Device* device);
Device& device_of(Space space);
/// Host memory that a GPU copies to and from at full speed while the host goes on; the plain host where no GPU is used.
Device& pinned_device();
void set_pinned_device(Device* device);

/// Current and peak bytes of this process per category; allocation through Tensor keeps it.
struct MemoryUse {
  std::int64_t current[kMemoryCategories] = {};
  std::int64_t peak[kMemoryCategories] = {};
  std::int64_t current_total = 0, peak_total = 0;
};
const MemoryUse& memory_use();
void reset_peak_memory();

}  // namespace ballast
