// What a GPU ran between two moments: every kernel, memory set and copy with its own clock, by
// CUPTI (loaded at run time; part of the CUDA Toolkit).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ballast::cuda {

/// All launches of one kernel; memory sets and copies are called "[memset]" and "[memcpy]".
struct KernelTime {
  std::string name;  ///< mangled: that of a local kernel has its file's name in it
  std::int64_t launches = 0;
  double seconds = 0;
};

/// Longer than a launch that was waiting takes to begin.
inline constexpr double kPause = 20e-6;

struct KernelTrace {
  std::vector<KernelTime> kernels;  ///< longest first
  double busy_s = 0;                ///< at least one of them was running
  double span_s = 0;                ///< from the first's start to the last's end
  double pauses_s = 0;              ///< of that, idle for more than kPause at a time
};

/// Begins to record.  Empty, or why this machine cannot (no libcupti, or a driver that refuses).
/// One recording at a time; meanwhile no algorithms of products are tried.
std::string start_kernel_trace();
/// Waits for the device and ends the recording.
KernelTrace stop_kernel_trace();

}  // namespace ballast::cuda
