#include "app/observe/step_log.hpp"

#include <fmt/format.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <sstream>
#include <utility>

namespace ballast {

struct StepLog::Impl {
  std::shared_ptr<spdlog::logger> terminal_log, file_log;  ///< the second one may be null
  bool terminal = false;
  void both(const std::string& on_terminal, const std::string& in_file) const {
    terminal_log->info("{}", on_terminal);
    if (file_log) file_log->info("{}", in_file);
  }
  void clear_progress() const {
    if (terminal) fmt::print(stderr, "\r\033[K");
  }
};

std::string time_left(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s >= 360000) return fmt::format("{}d {:02}:{:02}", s / 86400, s / 3600 % 24, s / 60 % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

StepLog::StepLog(const std::string& file, bool active) {
  if (!active) return;
  impl_ = std::make_unique<Impl>();
  const auto logger = [](spdlog::sink_ptr sink) {
    auto made = std::make_shared<spdlog::logger>("steps", std::move(sink));
    made->set_pattern("%v");
    made->flush_on(spdlog::level::info);
    return made;
  };
  impl_->terminal_log = logger(std::make_shared<spdlog::sinks::stdout_sink_mt>());
  impl_->terminal_log->set_error_handler([](const std::string&) {});  // nobody reads it any more
  try {
    if (!file.empty()) {
      impl_->file_log = logger(std::make_shared<spdlog::sinks::basic_file_sink_mt>(file));
      // Said once; lines follow again where the disk has room again.
      impl_->file_log->set_error_handler([told = false](const std::string& why) mutable {
        if (!std::exchange(told, true))
          fmt::print(stderr, "ballast: warning: the run goes on without lines of its log: {}\n",
                     why);
      });
    }
  } catch (const spdlog::spdlog_ex& e) {
    fmt::print(stderr, "ballast: warning: the run goes on without its log: {}\n", e.what());
  }
  impl_->terminal = ::isatty(STDERR_FILENO) != 0;
}

StepLog::~StepLog() {
  if (impl_) impl_->clear_progress();
}

void StepLog::comment(const std::string& text) {
  if (!impl_) return;
  impl_->clear_progress();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) impl_->both("# " + line, "# " + line);
}

void StepLog::step(const StepFields& fields, const std::string& line) {
  if (!impl_) return;
  std::string all;
  for (const auto& [key, value] : fields) all += (all.empty() ? "" : " ") + key + "=" + value;
  impl_->clear_progress();
  impl_->both(line, all);
}

void StepLog::progress(std::int64_t step, std::int64_t steps, double seconds_left) {
  if (!impl_ || !impl_->terminal) return;
  const int width = 30, done = steps > 0 ? static_cast<int>(width * step / steps) : width;
  const std::string left =
      seconds_left < 0 ? "" : fmt::format("  {} left", time_left(seconds_left));
  fmt::print(stderr, "\r\033[K[{:=<{}}{:<{}}] {}/{}{}", "", done, "", width - done, step, steps,
             left);
}

}  // namespace ballast
