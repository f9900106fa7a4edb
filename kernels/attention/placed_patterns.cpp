#include "kernels/attention/placed_patterns.hpp"

#include "kernels/attention/attention.hpp"

namespace ballast {

const std::vector<AttentionWork>& PlacedPatterns::at(const Tensor& q, const Tensor& k) {
  const std::pair heads(q.size(1), k.size(1));
  if (works_.size() == patterns_.size() && space_ == q.space() && heads_ == heads) return works_;
  works_.clear();
  for (const AttentionPattern& pattern : patterns_) works_.push_back(place_pattern(pattern, q, k));
  space_ = q.space();
  heads_ = heads;
  return works_;
}

}  // namespace ballast
