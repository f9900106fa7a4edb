// Sampler: the global order of samples.  Depends on seed, epoch and the dataset's lengths alone,
// never on the mesh.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/plan/batch/batch.hpp"

namespace ballast {

/// Samples of a step: more take minutes to plan and gigabytes to hold.
inline constexpr std::int64_t kMostStepSamples = std::int64_t{1} << 24;

/// Where the next step's samples begin.  Stored in checkpoints.
struct SamplerPosition {
  std::int64_t epoch = 0;
  std::int64_t index = 0;  ///< in the epoch's order: of the next step, or of its window
  /// Steps of the window that are done, and the window's length where some are (SamplerWindow).
  std::int64_t window_step = 0, window = 0;
  bool operator==(const SamplerPosition&) const = default;
};

/// Short samples first (HBP Section 4.3): the first `steps` steps of the first epoch take samples
/// of at most max_tokens alone.  A step is as large as Sampler::next makes it.
struct Curriculum {
  std::int64_t steps = 0;  ///< 0: none
  std::int64_t max_tokens = 0;
  std::int64_t global_tokens = 0, global_samples = 0;
};
/// What it does, in words, where the epoch's short samples fill `filled` of its steps; "": it is
/// none.
std::string curriculum_text(const Curriculum& curriculum, std::int64_t filled);

/// Splits samples 0..n-1 into training and validation by a counter-based hash, and shuffles
/// training anew each epoch.
class Sampler {
 public:
  /// `validation_share` in [0, 1) of the samples, each decided by its own hash, so that a dataset
  /// that grows keeps its split; above 0, and with two samples or more, both sides get at least
  /// one.  `document` (optional) maps a sample to what it was cut from: all pieces of a document
  /// fall on one side.  The last `held_out` samples are validation, whatever the share says of the
  /// others.  Errors: no sample for training, a share outside [0, 1).
  Sampler(std::int64_t samples, std::uint64_t seed, double validation_share, bool shuffle = true,
          const std::function<std::int64_t(std::int64_t)>& document = {},
          std::int64_t held_out = 0);
  /// Puts the short samples of the curriculum's steps before all others in the first epoch's order,
  /// which otherwise stays; so each sample still comes once, and a position means the same after a
  /// restart.  Fewer steps where the epoch has too few short samples.
  void begin_with(const Curriculum& curriculum,
                  const std::function<std::int64_t(std::int64_t)>& length);
  /// Steps that begin_with could fill.
  std::int64_t short_steps() const { return short_steps_; }
  /// Samples of those steps: the first ones of epoch 0.
  std::int64_t short_samples() const { return short_samples_; }
  std::uint64_t seed() const { return seed_; }
  const std::vector<std::int64_t>& validation() const { return validation_; }  ///< ascending
  /// What an evaluation takes: the first `most` of them (0: all).
  std::vector<std::int64_t> evaluated(std::int64_t most) const {
    std::vector<std::int64_t> list = validation_;
    if (most > 0 && std::ssize(list) > most) list.resize(static_cast<std::size_t>(most));
    return list;
  }
  std::int64_t training_samples() const { return static_cast<std::int64_t>(training_.size()); }
  /// Samples of the next step: taken in order until `global_tokens` tokens are reached (at least
  /// one sample; the one that reaches it is included) or, when global_samples > 0, exactly that
  /// many.  Advances `position`, wraps into the next epoch.  `length` gives a sample's tokens.  A
  /// step that needs more than is left of an epoch goes on in the next one, so that a sample can
  /// come twice in one step (always, when a step needs more than an epoch holds).  The position
  /// after an epoch's last sample is the start of the next epoch.  Errors: a position outside the
  /// epoch (another dataset), an epoch without a single token, more than kMostStepSamples samples.
  std::vector<std::int64_t> next(SamplerPosition& position, std::int64_t global_tokens,
                                 std::int64_t global_samples,
                                 const std::function<std::int64_t(std::int64_t)>& length);

 private:
  const std::vector<std::int64_t>& order(std::int64_t epoch);
  std::uint64_t seed_;
  bool shuffle_;
  std::vector<std::int64_t> training_, validation_, order_;
  std::vector<std::int64_t> first_order_;  ///< of epoch 0 under a curriculum
  std::int64_t short_steps_ = 0, short_samples_ = 0;
  std::int64_t order_epoch_ = -1;
};

}  // namespace ballast
