// When a product's algorithms are tried against each other.  Includes nothing of CUDA.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace ballast::cuda {

/// Calls of one shape of product.  A trial gains 1 to 4 % of a product's time, and costs the
/// loading of eight kernels (0.1 to 0.9 s) and up to 1.6 s of products: it waits until the shape
/// has done the work of a minute.  A shape that passes, as every length of a pack does, must not be
/// tried however often a micro-batch of many layers calls it, so no more than `kWindow` calls of
/// all shapes for each of its own may lie between the first of them and the last.  A layer has some
/// 27 products, recomputation included, one or two of a shape: a shape of two fifths of the
/// micro-batches is tried.
class TrialRule {
 public:
  static constexpr double kWork = 4e16;  ///< FLOPs: a minute of an H100 or H200
  static constexpr std::int64_t kFewestCalls = 128, kWindow = 64;

  /// `flops`: of a call; `work`: FLOPs after which the trial is due, in `kFewestCalls` at least.
  explicit TrialRule(double flops = 1, double work = kWork)
      : due_(std::max(kFewestCalls, static_cast<std::int64_t>(std::ceil(work / flops)))) {}

  /// Counts a call, which is number `of_all` of those of all shapes; true where the trial is due.
  bool due(std::int64_t of_all) {
    if (calls_++ == 0) first_ = of_all;
    if (calls_ < due_) return false;
    calls_ = 0;
    return of_all - first_ < kWindow * due_;
  }

 private:
  std::int64_t due_, calls_ = 0, first_ = 0;
};

}  // namespace ballast::cuda
