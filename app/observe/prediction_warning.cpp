#include "app/observe/prediction_warning.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace ballast {
namespace {

constexpr double kOff = 0.2;  // error beyond which plans made from the table are doubtful

}  // namespace

std::string PredictionWarning::look(std::int64_t step, double measured_s, double predicted_s,
                                    const StepTerms& terms) {
  if (!std::exchange(warm_, true) || predicted_s <= 0 || step < silent_until_) return "";
  const double ratio = measured_s / predicted_s;
  if (std::abs(ratio - 1) <= kOff) return "";
  silence_ *= 2;
  silent_until_ = step + silence_;
  const auto list = terms.list();
  const auto largest = std::max_element(
      list.begin(), list.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return fmt::format(
      "the schedule of step {} took {:.3g} s, {:.2f} x the predicted {:.3g} s, of which the "
      "largest "
      "term is {} ({:.3g} s); if that stays so, measure the profile table anew with `ballast "
      "profile` (not said again before step {})",
      step, measured_s, ratio, predicted_s, largest->first, largest->second, silent_until_);
}

}  // namespace ballast
