#include "kernels/cuda/runtime/device.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/tensor.hpp"
#include "core/base/wait_clock.hpp"

namespace ballast::cuda {
namespace {
cudaStream_t g_streams[kQueues] = {};
cudaStream_t& g_stream = g_streams[static_cast<int>(Queue::compute)];
Tensor g_scratch;
std::function<void(double)> g_watch;
/// Pinned memory to give back when the GPU is idle: giving it back waits for the GPU, which in the
/// midst of a step may itself wait for a transfer to another rank, and that rank for this host.
std::vector<void*> g_retired;

/// Polls `query` until it no longer answers "not ready".
template <class Query>
void poll(Query query, const char* what) {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  double asked_s = now();
  WaitClock clock(asked_s);
  for (;;) {
    const cudaError_t state = query();
    if (state != cudaErrorNotReady) return check(state, what);
    cudaGetLastError();  // "not ready" is no error, but a later launch would report it as one
    const double now_s = now(), waited_s = clock.waited_s(now_s);
    if (g_watch && now_s - asked_s > 1e-3) {
      asked_s = now_s;
      g_watch(waited_s);
    }
    sched_yield();
  }
}

/// Returns when a queue's work is done.
void wait_for_queue(Queue queue, const char* what) {
  poll([queue] { return cudaStreamQuery(stream(queue)); }, what);
}
}  // namespace

void wait_for(cudaEvent_t event, const char* what) {
  poll([event] { return cudaEventQuery(event); }, what);
}

namespace {
/// Page-locked memory through which host data reach the GPU.  From ordinary memory the driver may
/// first wait for the stream to drain, so the host could not prepare a micro-batch while the GPU
/// works on the one before.  Kept until the process ends: freeing it would wait for the GPU, also
/// for one whose peers are gone.
class Staging {
 public:
  void copy(void* to, const void* from, std::size_t bytes) {
    if (!memory_) {
      check(cudaHostAlloc(reinterpret_cast<void**>(&memory_), kSlots * kSlotBytes,
                          cudaHostAllocDefault),
            "allocation of page-locked memory");
      for (cudaEvent_t& e : free_)
        check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreate");
    }
    for (std::size_t at = 0; at < bytes;) {
      if (used_ >= kSlotBytes) next_slot();
      const std::size_t n = std::min(bytes - at, kSlotBytes - used_);
      char* staged = memory_ + slot_ * kSlotBytes + used_;
      std::memcpy(staged, static_cast<const char*>(from) + at, n);
      check(
          cudaMemcpyAsync(static_cast<char*>(to) + at, staged, n, cudaMemcpyHostToDevice, g_stream),
          "copy to the GPU");
      at += n;
      used_ += (n + 255) / 256 * 256;
    }
  }

 private:
  void next_slot() {
    check(cudaEventRecord(free_[slot_], g_stream), "cudaEventRecord");
    slot_ = (slot_ + 1) % kSlots;
    used_ = 0;
    wait_for(free_[slot_], "an earlier copy to the GPU");
  }
  static constexpr std::size_t kSlots = 4, kSlotBytes = std::size_t{4} << 20;
  char* memory_ = nullptr;
  std::array<cudaEvent_t, kSlots> free_{};
  std::size_t slot_ = 0, used_ = 0;
};
Staging g_staging;
}  // namespace

void copy_to_gpu(void* to, const void* from, std::size_t bytes) { g_staging.copy(to, from, bytes); }

void set_wait_watch(std::function<void(double)> watch) { g_watch = std::move(watch); }

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  const char* remedy = code == cudaErrorMemoryAllocation
                           ? "; use fewer tokens per micro-batch, recompute.mode = \"full\", "
                             "optimizer.zero or more ranks"
                           : "";
  fail("CUDA: {} failed: {} ({}){}", what, cudaGetErrorString(code), cudaGetErrorName(code),
       remedy);
}

int device_count(std::string& why) {
  // Streams share the device's work queues, eight unless asked otherwise before CUDA starts.  NCCL
  // has several streams for each of a pipeline's channels, and a transfer that waits for its peer
  // would hold up whatever lies behind it in its queue: stages that wait for each other's transfers
  // then wait for ever.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    why = cudaGetErrorString(code);
    cudaGetLastError();
    return 0;
  }
  if (count == 0) why = "no CUDA device is visible";
  return count;
}

CudaDevice::CudaDevice(int local_rank) {
  std::string why;
  const int count = device_count(why);
  require(count > 0, "run.backend = \"cuda\": {}; use run.backend = \"host\" here", why);
  index_ = local_rank % count;
  const cudaError_t opened = cudaSetDevice(index_);
  require(
      opened != cudaErrorMemoryAllocation,
      "CUDA: GPU {} has no room for another process: its memory is in use, or too many processes "
      "share it; `nvidia-smi` lists them",
      index_);
  check(opened, "cudaSetDevice");
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
  description_ = fmt::format("{} #{} (sm_{}{}, {} GiB)", properties.name, index_, properties.major,
                             properties.minor, properties.totalGlobalMem >> 30);
  for (const char byte : properties.uuid.bytes)
    identity_ += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  for (cudaStream_t& stream : g_streams)
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaMemPool_t pool;
  check(cudaDeviceGetDefaultMemPool(&pool, index_), "cudaDeviceGetDefaultMemPool");
  check(cudaMemPoolTrimTo(pool, 0), "cudaMemPoolTrimTo");  // what an earlier session left
  std::uint64_t keep = UINT64_MAX;
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
        "cudaMemPoolSetAttribute");
}

CudaDevice::~CudaDevice() {
  g_scratch = {};
  for (const Fences& fences : fences_)
    for (cudaEvent_t event : fences.events)
      if (event) cudaEventDestroy(event);
  for (cudaStream_t& stream : g_streams) cudaStreamDestroy(std::exchange(stream, nullptr));
}

void* CudaDevice::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* pointer = nullptr;
  const cudaError_t code = cudaMallocAsync(&pointer, bytes, g_stream);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(
        "CUDA: {:.1f} MiB could not be allocated on {}; use fewer tokens per micro-batch, "
        "recompute.mode = \"full\", optimizer.zero or more ranks",
        static_cast<double>(bytes) / (1 << 20), description_);
  }
  check(code, "cudaMallocAsync");
  return pointer;
}

void CudaDevice::deallocate(void* pointer, std::size_t) noexcept {
  if (pointer && g_stream) cudaFreeAsync(pointer, g_stream);
}

void CudaDevice::zero(void* pointer, std::size_t bytes) {
  if (bytes) check(cudaMemsetAsync(pointer, 0, bytes, g_stream), "cudaMemsetAsync");
}

void CudaDevice::copy(void* to, Space to_space, const void* from, Space from_space,
                      std::size_t bytes) {
  if (bytes == 0) return;
  if (to_space == Space::host)
    wait_for_queue(Queue::compute,
                   "work before a copy to the host");  // the copy itself would wait without polling
  if (to_space == Space::cuda && from_space == Space::host) return copy_to_gpu(to, from, bytes);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, g_stream), "cudaMemcpyAsync");
  if (to_space == Space::host) check(cudaStreamSynchronize(g_stream), "copy to the host");
}

std::int64_t CudaDevice::used_bytes() {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<std::int64_t>(total - free);
}

void CudaDevice::settle() {
  for (const Queue queue : {Queue::compute, Queue::to_host, Queue::to_device})
    wait_for_queue(queue, "work on the GPU");
  if (!g_retired.empty()) synchronize();
}

void CudaDevice::synchronize() {
  for (const Queue queue : {Queue::compute, Queue::to_host, Queue::to_device, Queue::update})
    wait_for_queue(queue, "work on the GPU");
  for (void* pointer : std::exchange(g_retired, {})) cudaFreeHost(pointer);
}

void CudaDevice::queue_copy(Queue queue, void* to, const void* from, std::size_t bytes) {
  if (bytes)
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream(queue)), "cudaMemcpyAsync");
}

void* PinnedHost::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  void* pointer = nullptr;
  check(cudaMallocHost(&pointer, bytes), "cudaMallocHost (pinned host memory)");
  return pointer;
}

void PinnedHost::deallocate(void* pointer, std::size_t) noexcept {
  if (pointer) g_retired.push_back(pointer);
}

void PinnedHost::zero(void* pointer, std::size_t bytes) {
  if (bytes) std::memset(pointer, 0, bytes);
}

void PinnedHost::copy(void* to, Space, const void* from, Space, std::size_t bytes) {
  if (bytes) std::memmove(to, from, bytes);
}

Fence CudaDevice::fence(Queue queue) {
  Fences& fences = fences_[static_cast<int>(queue)];
  cudaEvent_t& event = fences.events[fences.next % kFences];
  if (event == nullptr)
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventRecord(event, stream(queue)), "cudaEventRecord");
  return {queue, fences.next++};
}

cudaEvent_t CudaDevice::event_of(Fence fence) const {
  const Fences& fences = fences_[static_cast<int>(fence.queue)];
  require(fence.number < fences.next, "CUDA: fence {} of {} was never made", fence.number,
          fences.next);
  return fences.events[std::max(fence.number, fences.next - kFences) % kFences];
}

void CudaDevice::wait(Fence fence, Queue later) {
  if (!fence.empty())
    check(cudaStreamWaitEvent(stream(later), event_of(fence), 0), "cudaStreamWaitEvent");
}

void CudaDevice::wait(Fence fence) {
  if (!fence.empty()) wait_for(event_of(fence), "work on the GPU");
}

cudaStream_t stream(Queue queue) { return g_streams[static_cast<int>(queue)]; }

void* scratch(std::size_t bytes) {
  if (bytes > g_scratch.bytes()) {
    g_scratch = {};
    g_scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::u8, device_of(Space::cuda),
                              MemoryCategory::workspace);
  }
  return g_scratch.raw();
}

namespace {

/// Marks are indices of recorded events; times are measured from an origin event tied to the host
/// clock.  The distance of two events is a float of milliseconds, too coarse after minutes, so the
/// origin moves along every few seconds.
class DeviceClock final : public Clock {
 public:
  DeviceClock() {
    for (cudaEvent_t* e : {&origin_, &next_origin_}) check(cudaEventCreate(e), "cudaEventCreate");
    check(cudaEventRecord(origin_, g_stream), "cudaEventRecord");
    check(cudaEventSynchronize(origin_), "cudaEventSynchronize");
    origin_s_ = recorded_s_ = host_s();
  }
  ~DeviceClock() override {
    cudaEventDestroy(origin_);
    cudaEventDestroy(next_origin_);
    for (cudaEvent_t e : events_) cudaEventDestroy(e);
    for (cudaEvent_t e : free_) cudaEventDestroy(e);
  }
  std::int64_t mark(Queue queue) override {
    if (queue == Queue::compute && next_origin_mark_ < 0 && host_s() - recorded_s_ > kOriginAge) {
      check(cudaEventRecord(next_origin_, g_stream), "cudaEventRecord");
      next_origin_mark_ = next();
      recorded_s_ = host_s();
    }
    if (free_.empty()) {
      free_.emplace_back();
      check(cudaEventCreate(&free_.back()), "cudaEventCreate");
    }
    check(cudaEventRecord(free_.back(), stream(queue)), "cudaEventRecord");
    events_.push_back(free_.back());
    free_.pop_back();
    return next() - 1;
  }
  void forget(std::int64_t before) override {
    for (; first_ < before && !events_.empty(); ++first_) {
      free_.push_back(events_.front());
      events_.pop_front();
    }
  }
  double seconds(std::int64_t mark) override {
    require(mark >= first_ && mark < next(), "CUDA clock: mark {} is not among {} to {}", mark,
            first_, next() - 1);
    const cudaEvent_t event = events_[static_cast<std::size_t>(mark - first_)];
    check(cudaEventSynchronize(event), "cudaEventSynchronize");
    // A mark after the next origin is done, so that origin is too.
    if (next_origin_mark_ >= 0 && mark >= next_origin_mark_) {
      origin_s_ += between(origin_, next_origin_);
      origin_mark_ = next_origin_mark_;
      next_origin_mark_ = -1;
      std::swap(origin_, next_origin_);
    }
    return mark >= origin_mark_ ? origin_s_ + between(origin_, event)
                                : origin_s_ - between(event, origin_);
  }

 private:
  static double host_s() { return host_clock().seconds(host_clock().mark()); }
  static double between(cudaEvent_t earlier, cudaEvent_t later) {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, earlier, later), "cudaEventElapsedTime");
    return ms * 1e-3;
  }
  std::int64_t next() const { return first_ + static_cast<std::int64_t>(events_.size()); }
  static constexpr double kOriginAge = 2;  // seconds: steps of a quarter of a microsecond
  cudaEvent_t origin_ = nullptr, next_origin_ = nullptr;
  double origin_s_ = 0, recorded_s_ = 0;
  std::int64_t origin_mark_ = 0,
               next_origin_mark_ = -1;  ///< first mark after the event; -1: not recorded
  std::deque<cudaEvent_t> events_;      ///< of the marks from first_ on
  std::vector<cudaEvent_t> free_;
  std::int64_t first_ = 0;
};

}  // namespace

std::unique_ptr<Clock> device_clock() { return std::make_unique<DeviceClock>(); }

}  // namespace ballast::cuda
