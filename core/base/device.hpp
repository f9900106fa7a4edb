// Device: where memory lives and how bytes move.  One implementation per backend (host here, CUDA
// in kernels/cuda).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ballast {

enum class Space { host, cuda };

/// What a piece of memory is for; peak bytes are kept per category (trace and `check`). `offloaded`
/// is state put away in host memory: totals leave it out, because they say what the device of a run
/// needs.
enum class MemoryCategory {
  parameters,
  gradients,
  optimizer,
  activations,
  communication,
  kv_store,
  workspace,
  data,
  offloaded
};
inline constexpr int kMemoryCategories = 9;
const char* name(MemoryCategory category);

/// Queues of a device: computation, copies to and from memory of pinned_device(), and updates of
/// parameters beside computation.  Work of one queue runs in order; queues run beside each other.
enum class Queue { compute, to_host, to_device, update };
inline constexpr int kQueues = 4;

/// The work that one queue holds when the fence is made.  Without a number it holds nothing.
struct Fence {
  Queue queue = Queue::compute;
  std::int64_t number = -1;
  bool empty() const { return number < 0; }
};

/// Allocation and transfer on one memory space.  Errors throw ballast::Error.
class Device {
 public:
  virtual ~Device() = default;
  virtual Space space() const = 0;
  virtual std::string description() const = 0;
  virtual void* allocate(
      std::size_t bytes) = 0;  ///< at least 64-byte aligned; 0 bytes gives nullptr
  virtual void deallocate(void* pointer, std::size_t bytes) noexcept = 0;
  virtual void zero(void* pointer, std::size_t bytes) = 0;
  /// Copies between this device and the host or within the device; ordered with this device's
  /// compute queue.
  virtual void copy(void* to, Space to_space, const void* from, Space from_space,
                    std::size_t bytes) = 0;
  /// Returns when the work of all queues is done.
  virtual void synchronize() = 0;
  /// Returns when the work of all queues but Queue::update is done: a step is over, while the next
  /// one may begin beside its update.
  virtual void settle() { synchronize(); }
  /// Appends a copy between this device and memory of pinned_device() to a queue.  The caller
  /// orders it with other queues and keeps both sides until it is done; parallel/comm/host_copy.hpp
  /// does.  A device without queues, as the host, copies at once and gives empty fences.
  virtual void queue_copy(Queue, void* to, const void* from, std::size_t bytes) {
    copy(to, space(), from, space(), bytes);
  }
  virtual Fence fence(Queue) { return {}; }
  /// Work that is queued in `later` from now on begins when that of the fence is done.
  virtual void wait(Fence, Queue later) { static_cast<void>(later); }
  /// The host waits: keeps it from running far ahead.
  virtual void wait(Fence) {}
  /// Bytes in use on the device by all its processes, with contexts, libraries and what pools keep;
  /// 0 where that is not known.
  virtual std::int64_t used_bytes() { return 0; }
};

/// The host device: storage from Kokkos.  Kokkos must be initialised before the first allocation.
Device& host_device();
/// Puts another device in its place (tests); nullptr puts it back.  It must outlive all memory that
/// it gave.
void set_host_device(Device* device);
/// The CUDA device of this process, or nullptr when none was set up (see kernels/cuda).
Device* cuda_device();
void set_cuda_device(Device* device);
Device& device_of(Space space);
/// Host memory that a GPU copies to and from at full speed while the host goes on; the plain host
/// where no GPU is used.
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
