// Overheads of balance in a running step: budget tuning (dst.enabled) and planning (batching.method
// sab, lbb), from the step's events.
#pragma once
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/observe/events.hpp"
#include "core/observe/metrics.hpp"

namespace ballast {

/// A step's seconds on the rank that spends most.  On a GPU they are the stream's, so that host
/// work hidden behind kernels costs nothing.
struct OverheadSeconds {
  double tuning_s = 0, planning_s = 0;
};

/// Which of the two a run has, and their shares of the steps so far.
class Overheads {
 public:
  /// `tunes`: dst.enabled; `predicts`: batching by predicted latency or length (sab, lbb).
  Overheads(bool tunes, bool predicts) : dst_(tunes), sab_(predicts) {}
  bool any() const { return dst_ || sab_; }
  /// `most`: of the rank that spends most.
  void add(const OverheadSeconds& most, double step_s);
  /// dst_overhead_share, sab_overhead_share: those that the run has, once a step was added.
  std::vector<std::pair<std::string, double>> shares() const;

 private:
  bool dst_, sab_, added_ = false;
  OverheadShare tuning_, planning_;
};

/// Of one rank's events in `step`.
OverheadSeconds overhead_seconds(std::span<const Event> events, std::int64_t step);

}  // namespace ballast
