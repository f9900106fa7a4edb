#include "core/config/learning_rate.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ballast {

double LearningRate::at(std::int64_t step) const {
  if (step <= warmup_steps && warmup_steps > 0)
    return peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (schedule == LearningRateSchedule::constant) return peak;
  const std::int64_t begin = schedule == LearningRateSchedule::wsd
                                 ? std::max(warmup_steps, decay_steps - wsd_decay_steps)
                                 : warmup_steps;
  const double progress =
      decay_steps > begin
          ? std::clamp(static_cast<double>(step - begin) / static_cast<double>(decay_steps - begin),
                       0.0, 1.0)
          : (step < decay_steps ? 0.0 : 1.0);
  const double left = schedule == LearningRateSchedule::cosine
                          ? 0.5 * (1.0 + std::cos(std::numbers::pi * progress))
                          : 1.0 - progress;
  return minimum + (peak - minimum) * left;
}

}  // namespace ballast
