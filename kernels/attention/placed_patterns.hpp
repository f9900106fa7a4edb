// Host patterns of an executor and, once a call needs them, their device twins.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/plan/attention/attention_work.hpp"

namespace ballast {

class PlacedPatterns {
 public:
  explicit PlacedPatterns(std::vector<AttentionPattern> patterns)
      : patterns_(std::move(patterns)) {}
  const std::vector<AttentionPattern>& patterns() const { return patterns_; }
  /// The patterns where q lies, for calls with the heads of q [., Hq, D] and k [., Hkv, D].  The
  /// first call and one with other heads place them; the same objects until then.
  const std::vector<AttentionWork>& at(const Tensor& q, const Tensor& k);

 private:
  std::vector<AttentionPattern> patterns_;
  std::vector<AttentionWork> works_;
  Space space_ = Space::host;
  std::pair<std::int64_t, std::int64_t> heads_{0, 0};
};

}  // namespace ballast
