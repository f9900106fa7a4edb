// Where the figures of steps and evaluations go: trace, log, progress line, JSON, TensorBoard.  A
// sink only looks: it exchanges nothing between ranks, and one that fails costs itself and one
// warning, never the run.
#pragma once
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/observe/step_log.hpp"
#include "app/observe/step_statistics.hpp"
#include "app/observe/trace_observer.hpp"
#include "io/trace/event_file.hpp"

namespace ballast {

/// What a step shows on the terminal, `left_s` seconds before the run ends: at most 100 columns,
/// what does not fit is left out.
std::string step_line(const StepStatistics& statistics, double left_s);

/// What an evaluation after `step` steps found, the names as the trace has them (validation_loss
/// ...).
struct EvaluationFigures {
  std::int64_t step = 0;
  StepRow scalars;
  nlohmann::ordered_json generated;  ///< an array of texts; null: none were asked for
  std::vector<std::string> texts;    ///< the same, a line each
};

class StepSink {
 public:
  virtual ~StepSink() = default;
  virtual void step(const StepStatistics& statistics) = 0;
  virtual void evaluation(const EvaluationFigures& figures) = 0;
};

/// Hands everything to each sink, and drops one that throws.
class StepSinks {
 public:
  /// `warn` gets a line for each sink that is lost.
  explicit StepSinks(std::function<void(const std::string&)> warn) : warn_(std::move(warn)) {}
  /// Adds what `make` makes under the name that a warning calls it by.
  void add(const std::string& name, const std::function<std::unique_ptr<StepSink>()>& make);
  void step(const StepStatistics& statistics);
  void evaluation(const EvaluationFigures& figures);

 private:
  struct Named {
    std::string name;
    std::unique_ptr<StepSink> sink;
  };
  void each(const std::function<void(StepSink&)>& use);
  std::function<void(const std::string&)> warn_;
  std::vector<Named> sinks_;
};

/// A row of scalars of this rank's trace.
class TraceSink final : public StepSink {
 public:
  /// `writes_texts`: whether this rank's trace holds the generated texts.
  TraceSink(TraceObserver& trace, bool writes_texts) : trace_(trace), writes_texts_(writes_texts) {}
  void step(const StepStatistics& statistics) override;
  void evaluation(const EvaluationFigures& figures) override;

 private:
  TraceObserver& trace_;
  bool writes_texts_;
};

/// A line every `every` steps, of the first and of the last one; on a terminal also the progress.
class LogSink final : public StepSink {
 public:
  LogSink(StepLog& log, std::int64_t every) : log_(log), every_(every) {}
  void step(const StepStatistics& statistics) override;
  void evaluation(const EvaluationFigures& figures) override;

 private:
  StepLog& log_;
  std::int64_t every_;
};

/// The last step's figures, for --json.
class JsonSink final : public StepSink {
 public:
  explicit JsonSink(nlohmann::ordered_json& summary) : summary_(summary) {}
  void step(const StepStatistics& statistics) override;
  void evaluation(const EvaluationFigures& figures) override;

 private:
  nlohmann::ordered_json& summary_;
  std::vector<std::string> told_;  ///< figures of the last step
};

/// One JSON object a line, of each step and each evaluation, appended to `file`.
class JsonLinesSink final : public StepSink {
 public:
  explicit JsonLinesSink(const std::string& file);
  void step(const StepStatistics& statistics) override;
  void evaluation(const EvaluationFigures& figures) override;

 private:
  void write(nlohmann::ordered_json line);
  std::string file_;
  std::ofstream out_;
};

/// Charts train/loss, speed/mfu, eval/loss ... in a new event file of folder `dir`, which replaces
/// what earlier sessions wrote of steps after `step`.
class TensorBoardSink final : public StepSink {
 public:
  TensorBoardSink(const std::string& dir, std::int64_t step) : file_(dir, step) {}
  void step(const StepStatistics& statistics) override;
  void evaluation(const EvaluationFigures& figures) override;

 private:
  EventFile file_;
};

}  // namespace ballast
