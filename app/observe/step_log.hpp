// Step log: '#'-prefixed header, then one key=value line a step, on the terminal and in RUN/log.txt
// (rank 0).  On a terminal also a progress line with the time left.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ballast {

/// What a step line shows, in order.  Values are formatted already.
using StepFields = std::vector<std::pair<std::string, std::string>>;

class StepLog {
 public:
  /// Appends to `file`; an empty name logs to the terminal alone.  `active` is false on every rank
  /// but 0: calls do nothing.
  StepLog(const std::string& file, bool active);
  ~StepLog();
  void comment(const std::string& text);  ///< one '# ' line for each line of `text`
  void step(const StepFields& fields);
  /// Progress line (terminals only); `seconds_left` < 0 hides the estimate.
  void progress(std::int64_t step, std::int64_t steps, double seconds_left);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast
