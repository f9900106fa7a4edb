#include "kernels/cuda/runtime/kernel_trace.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "kernels/cuda/runtime/device.hpp"
#include "kernels/cuda/runtime/shared_library.hpp"

#if __has_include(<cupti.h>)
#include <cupti.h>
#define BALLAST_HAVE_CUPTI 1
#endif

namespace ballast::cuda {

#ifdef BALLAST_HAVE_CUPTI
namespace {

/// The functions of CUPTI that are called, from the library that is here.
struct Cupti {
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityFlushAll) flush = nullptr;
  decltype(&cuptiActivityGetNextRecord) next = nullptr;
  std::string missing;

  Cupti() {
    const std::string name = "libcupti.so." + std::to_string(CUDART_VERSION / 1000);
    try {
      const SharedLibrary library({name, "libcupti.so", "/usr/local/cuda/lib64/" + name,
                                   "/usr/local/cuda/extras/CUPTI/lib64/" + name});
      library.load(enable, "cuptiActivityEnable");
      library.load(disable, "cuptiActivityDisable");
      library.load(register_callbacks, "cuptiActivityRegisterCallbacks");
      library.load(flush, "cuptiActivityFlushAll");
      library.load(next, "cuptiActivityGetNextRecord");
    } catch (const Error& error) {
      missing = error.what();
    }
  }
};

Cupti& cupti() {
  static Cupti loaded;
  return loaded;
}

constexpr std::size_t kBufferBytes = std::size_t{4} << 20;
constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_MEMCPY};

/// Filled by CUPTI's thread.
struct Recording {
  std::mutex mutex;
  std::map<std::string, KernelTime> kernels;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> busy;  // start, end in ns

  void add(const char* name, std::uint64_t start, std::uint64_t end) {
    KernelTime& kernel = kernels[name];
    kernel.name = name;
    ++kernel.launches;
    kernel.seconds += 1e-9 * static_cast<double>(end - start);
    busy.emplace_back(start, end);
  }
};

Recording& recording() {
  static Recording made;
  return made;
}

void CUPTIAPI buffer_requested(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(ACTIVITY_RECORD_ALIGNMENT, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *records = 0;
}

void CUPTIAPI buffer_completed(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t,
                               std::size_t valid) {
  Recording& into = recording();
  const std::lock_guard lock(into.mutex);
  CUpti_Activity* record = nullptr;
  while (cupti().next(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto& k = *reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      into.add(k.name, k.start, k.end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto& m = *reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      into.add("[memset]", m.start, m.end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto& m = *reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
      into.add("[memcpy]", m.start, m.end);
    }
  }
  std::free(buffer);
}

}  // namespace

std::string start_kernel_trace() {
  Cupti& lib = cupti();
  if (!lib.missing.empty()) return lib.missing;
  recording().kernels.clear();
  recording().busy.clear();
  if (lib.register_callbacks(buffer_requested, buffer_completed) != CUPTI_SUCCESS)
    return "CUPTI refused its callbacks (another profiler may be attached)";
  for (const CUpti_ActivityKind kind : kKinds)
    if (lib.enable(kind) != CUPTI_SUCCESS)
      return "the driver refused to record kernels (another profiler may be attached)";
  hold_trials(true);
  return "";
}

KernelTrace stop_kernel_trace() {
  Cupti& lib = cupti();
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  hold_trials(false);
  lib.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  for (const CUpti_ActivityKind kind : kKinds) lib.disable(kind);
  Recording& from = recording();
  const std::lock_guard lock(from.mutex);
  KernelTrace trace;
  for (auto& [name, kernel] : from.kernels) trace.kernels.push_back(kernel);
  std::sort(trace.kernels.begin(), trace.kernels.end(),
            [](const KernelTime& a, const KernelTime& b) { return a.seconds > b.seconds; });
  std::sort(from.busy.begin(), from.busy.end());
  std::uint64_t reached = 0;
  for (const auto& [start, end] : from.busy) {
    const double idle =
        reached > 0 && start > reached ? 1e-9 * static_cast<double>(start - reached) : 0;
    if (idle > kPause) trace.pauses_s += idle;
    if (end > reached) trace.busy_s += 1e-9 * static_cast<double>(end - std::max(start, reached));
    reached = std::max(reached, end);
  }
  if (!from.busy.empty())
    trace.span_s = 1e-9 * static_cast<double>(reached - from.busy.front().first);
  return trace;
}

#else

std::string start_kernel_trace() {
  return "this program was built without CUPTI's header (cupti.h of the CUDA Toolkit)";
}
KernelTrace stop_kernel_trace() { return {}; }

#endif

}  // namespace ballast::cuda
