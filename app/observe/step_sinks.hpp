// Where the statistics of steps go: trace, log, progress line, JSON.  A sink only looks: it
// exchanges nothing between ranks.
#pragma once
#include <nlohmann/json.hpp>

#include "app/observe/step_log.hpp"
#include "app/observe/step_statistics.hpp"
#include "app/observe/trace_observer.hpp"

namespace ballast {

class StepSink {
 public:
  virtual ~StepSink() = default;
  virtual void step(const StepStatistics& statistics) = 0;
};

/// A row of scalars of this rank's trace.
class TraceSink final : public StepSink {
 public:
  explicit TraceSink(TraceObserver& trace) : trace_(trace) {}
  void step(const StepStatistics& statistics) override;

 private:
  TraceObserver& trace_;
};

/// A line every `every` steps, of the first and of the last one; on a terminal also the progress.
class LogSink final : public StepSink {
 public:
  LogSink(StepLog& log, std::int64_t every) : log_(log), every_(every) {}
  void step(const StepStatistics& statistics) override;

 private:
  StepLog& log_;
  std::int64_t every_;
};

/// The last step's figures, for --json.
class JsonSink final : public StepSink {
 public:
  explicit JsonSink(nlohmann::ordered_json& summary) : summary_(summary) {}
  void step(const StepStatistics& statistics) override;

 private:
  nlohmann::ordered_json& summary_;
};

}  // namespace ballast
