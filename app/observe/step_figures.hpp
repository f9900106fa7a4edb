// The figures of a step that people follow, once: the log, JSON and TensorBoard show the same list.
#pragma once
#include <string>
#include <vector>

#include "app/observe/step_statistics.hpp"

namespace ballast {

struct StepFigure {
  const char* key;    ///< in the log and in JSON
  const char* group;  ///< of TensorBoard's charts: train, speed, balance, memory
  double value;
  std::string text;  ///< as the log prints it
};

/// In the order of the log.
std::vector<StepFigure> step_figures(const StepStatistics& statistics);

}  // namespace ballast
