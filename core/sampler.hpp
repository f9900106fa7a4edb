// Sampler: the global order of samples.  Depends on seed, epoch and the dataset's lengths alone, never on the mesh.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/batch.hpp"

namespace ballast {

/// Where the next step's samples begin.  Stored in checkpoints.
struct SamplerPosition {
  std::int64_t epoch = 0;
  std::int64_t index = 0;  ///< in the epoch's order
  bool operator==(const SamplerPosition&) const = default;
};

/// Splits samples 0..n-1 into training and validation by a counter-based hash, and shuffles training anew each epoch.
class Sampler {
 public:
  Sampler(std::int64_t samples, std::uint64_t seed, double validation_share, bool shuffle = true);
  const std::vector<std::int64_t>& validation() const { return validation_; }
  std::int64_t training_samples() const { return static_cast<std::int64_t>(training_.size()); }
  /// Samples of the next step: taken in order until `global_tokens` tokens are reached (at least one sample; the one
  /// that reaches it is included) or, when global_samples > 0, exactly that many.  Advances `position`, wraps into the
  /// next epoch.  `length` gives a sample's tokens.
  std::vector<std::int64_t> next(SamplerPosition& position, std::int64_t global_tokens, std::int64_t global_samples,
                                 const std::function<std::int64_t(std::int64_t)>& length);

 private:
  const std::vector<std::int64_t>& order(std::int64_t epoch);
  std::uint64_t seed_;
  bool shuffle_;
  std::vector<std::int64_t> training_, validation_, order_;
  std::int64_t order_epoch_ = -1;
};

}  // namespace ballast
