// Step log (rank 0): '#'-prefixed header, then one line a step: key=value with all figures in
// RUN/log.txt, the few that people follow, in at most 100 columns, on standard output.  On a
// terminal also a progress line with the time left.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ballast {

/// What a step line shows, in order.  Values are formatted already.
using StepFields = std::vector<std::pair<std::string, std::string>>;

/// H:MM:SS of `seconds`, with days before from 100 hours on.
std::string time_left(double seconds);

class StepLog {
 public:
  /// Appends to `file`; an empty name logs to the terminal alone.  `active` is false on every rank
  /// but 0: calls do nothing.
  StepLog(const std::string& file, bool active);
  ~StepLog();
  void comment(const std::string& text);  ///< one '# ' line for each line of `text`
  /// `fields` go to the file, `line` to standard output.
  void step(const StepFields& fields, const std::string& line);
  /// Progress line (terminals only); `seconds_left` < 0 hides the estimate.
  void progress(std::int64_t step, std::int64_t steps, double seconds_left);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast
