// When a product's algorithms are tried against each other.  Includes nothing of CUDA.
#pragma once
#include <cstdint>

namespace ballast::cuda {

/// Calls of one shape of product.  A trial takes the time of some 35 products, so it waits for a
/// shape that stays: `kTrialCall` calls, a few steps.  A shape that passes, as every length of a
/// pack does, must not be tried however often a micro-batch of many layers calls it, so no more
/// than `kTrialWindow` calls, of all shapes, may lie between the first of them and the last.  A
/// layer has some 27 products, recomputation included, one or two of a shape: a shape of two fifths
/// of the micro-batches is tried.
class TrialRule {
 public:
  static constexpr std::int64_t kTrialCall = 128, kTrialWindow = 64 * kTrialCall;

  /// Counts a call, which is number `of_all` of those of all shapes; true where the trial is due.
  bool due(std::int64_t of_all) {
    if (calls_++ == 0) first_ = of_all;
    if (calls_ < kTrialCall) return false;
    calls_ = 0;
    return of_all - first_ < kTrialWindow;
  }

 private:
  std::int64_t calls_ = 0, first_ = 0;
};

}  // namespace ballast::cuda
