// Says when steps take another time than the profile table promised.
#pragma once
#include <cstdint>
#include <string>

#include "core/predict/simulate.hpp"

namespace ballast {

class PredictionWarning {
 public:
  /// One sentence where the schedule of step `step` (from 1) took more than 20 % more or less than
  /// predicted, with the largest term of the prediction; else "".  The first step of a session
  /// warms up and does not count; after a sentence it is silent for twice as many steps as before.
  std::string look(std::int64_t step, double measured_s, double predicted_s,
                   const StepTerms& terms);

 private:
  bool warm_ = false;
  std::int64_t silent_until_ = 0, silence_ = 4;
};

}  // namespace ballast
