// CUDA device of this process: stream-ordered memory, copies, a stream a queue, device-side clock.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/device.hpp"
#include "core/observe/events.hpp"

namespace ballast::cuda {

/// Throws ballast::Error naming `what`, the CUDA error and a remedy where one is known.
void check(cudaError_t code, const char* what);

/// Devices that this process can use; 0 with the reason in `why` (no driver, no device) when there
/// are none.
int device_count(std::string& why);

class CudaDevice final : public Device {
 public:
  /// Uses device `local_rank` mod count.  Memory comes from the device's stream-ordered pool, which
  /// keeps what it once took, so that a steady step allocates nothing from the driver.
  explicit CudaDevice(int local_rank);
  ~CudaDevice() override;
  Space space() const override { return Space::cuda; }
  std::string description() const override { return description_; }
  void* allocate(std::size_t bytes) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;
  void zero(void* pointer, std::size_t bytes) override;
  void copy(void* to, Space to_space, const void* from, Space from_space,
            std::size_t bytes) override;
  void synchronize() override;
  void settle() override;
  void queue_copy(Queue queue, void* to, const void* from, std::size_t bytes) override;
  Fence fence(Queue queue) override;
  void wait(Fence fence, Queue later) override;
  void wait(Fence fence) override;
  std::int64_t used_bytes() override;
  int index() const { return index_; }
  /// The card's UUID in hexadecimal: the same for every process that uses it, whatever number it
  /// has under CUDA_VISIBLE_DEVICES.
  const std::string& identity() const { return identity_; }

 private:
  /// Events are used again: a fence older than the latest kFences of its queue stands for the
  /// oldest of those, which lies behind it.
  static constexpr std::int64_t kFences = 1024;
  struct Fences {
    cudaEvent_t events[kFences] = {};
    std::int64_t next = 0;
  };
  cudaEvent_t event_of(Fence fence) const;
  int index_ = 0;
  Fences fences_[kQueues];
  std::string description_, identity_;
};

/// Page-locked host memory (core's pinned_device).  It goes back to the system at the next
/// CudaDevice::synchronize(), when nothing uses it.
class PinnedHost final : public Device {
 public:
  Space space() const override { return Space::host; }
  std::string description() const override { return "pinned host memory"; }
  void* allocate(std::size_t bytes) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;
  void zero(void* pointer, std::size_t bytes) override;
  void copy(void* to, Space to_space, const void* from, Space from_space,
            std::size_t bytes) override;
  void synchronize() override {}
};

/// Waits of the host for the GPU (CudaDevice::synchronize, copies to the host, wait_for) poll, so
/// that a transfer whose peer died cannot hold the host for ever.  `watch` is called about once a
/// millisecond with the seconds waited so far; it may throw, or end the process.
void set_wait_watch(std::function<void(double waited_s)> watch);
/// Until the work recorded in `event` is done; an event never recorded counts as done.  Errors name
/// `what`.
void wait_for(cudaEvent_t event, const char* what);

/// A queue's stream (created with the device).
cudaStream_t stream(Queue queue = Queue::compute);
/// Copies host memory to the GPU in the order of the compute stream, by way of page-locked memory:
/// `from` may go when this returns, and the host waits only when more than 12 MiB of copies are
/// outstanding.
void copy_to_gpu(void* to, const void* from, std::size_t bytes);
/// Scratch memory of at least `bytes` on the compute stream, grown when needed and reused by every
/// operation: valid until the next call.
void* scratch(std::size_t bytes);

/// Clock whose marks are events on the queues' streams, resolved after synchronisation.  Events of
/// forgotten marks are used again.  A mark on a queue of copies lies behind the computation of all
/// marks before it (copy_beside of parallel/comm/host_copy.hpp sees to that).
std::unique_ptr<Clock> device_clock();

/// Which dimension of a product counts tokens, and so changes from micro-batch to micro-batch.
enum class GemmTokens { none, m, k };
/// From here on products of up to `most` tokens come in any length.  cuBLASLt has a kernel for
/// nearly every length, and loads each (3 to 20 ms, for which other ranks wait) when it first runs:
/// the first product of every kind now loads those of all lengths.  0: each as it comes.
void expect_lengths(std::int64_t most);
/// From here on new shapes of products have their algorithms tried after so much work
/// (TrialRule::kWork); 0: as early as it can be, so that what follows runs as in a long training.
void try_products_after(double flops);
/// Whether trials wait until they are due again, so that what is timed or recorded holds none.
void hold_trials(bool held);
/// How many trials have waited so far.
std::int64_t trials_put_off();

/// Row-major C [m, n] = alpha op(A) [m, k] op(B) [k, n] + beta C by cuBLASLt: A and B bf16, fp32
/// accumulation, C bf16 or fp32. Leading dimensions in elements.  `bias` (bf16, [n]) is added when
/// not null (C bf16, beta 0).
struct Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  GemmTokens tokens = GemmTokens::none;
  const void* a = nullptr;
  std::int64_t lda = 0;
  bool transpose_a = false;
  const void* b = nullptr;
  std::int64_t ldb = 0;
  bool transpose_b = false;
  void* c = nullptr;
  std::int64_t ldc = 0;
  bool c_is_float = false;
  float alpha = 1, beta = 0;
  const void* bias = nullptr;
};
void gemm(const Gemm& call);

/// Row-major C [m, n] = A [m, k] B [n, k]^T + beta C of E4M3 bytes with scales
/// (kernels/ops/fp8.hpp) by cuBLASLt, fp32 accumulation, C bf16 or fp32.  Rows lie k apart (B, A),
/// n apart (C).  Scales of A and of a B without `b_blocks`: one a row and 128 of k, [k / 128][m or
/// n]; with it one a block of 128 x 128, [n / 128][k / 128, padded to 4].  m a multiple of 4; n and
/// k of 16.
struct Fp8Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  const float* a_scales = nullptr;
  const void* b = nullptr;
  const float* b_scales = nullptr;
  bool b_blocks = false;
  void* c = nullptr;
  bool c_is_float = false;
  float beta = 0;
};
void gemm(const Fp8Gemm& call);
/// Whether this GPU and this cuBLASLt multiply so.
bool has_fp8();

}  // namespace ballast::cuda
