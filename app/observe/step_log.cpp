#include "app/observe/step_log.hpp"

#include <fmt/format.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <sstream>

#include "core/base/error.hpp"

namespace ballast {

struct StepLog::Impl {
  std::shared_ptr<spdlog::logger> logger;
  bool terminal = false;
  void clear_progress() const {
    if (terminal) fmt::print(stderr, "\r\033[K");
  }
};

StepLog::StepLog(const std::string& file, bool active) {
  if (!active) return;
  std::vector<spdlog::sink_ptr> sinks{std::make_shared<spdlog::sinks::stdout_sink_mt>()};
  try {
    if (!file.empty()) sinks.push_back(std::make_shared<spdlog::sinks::basic_file_sink_mt>(file));
  } catch (const spdlog::spdlog_ex& e) {
    fail("log {} cannot be written: {}", file, e.what());
  }
  impl_ = std::make_unique<Impl>();
  impl_->logger = std::make_shared<spdlog::logger>("steps", sinks.begin(), sinks.end());
  impl_->logger->set_pattern("%v");
  impl_->logger->flush_on(spdlog::level::info);
  impl_->terminal = ::isatty(STDERR_FILENO) != 0;
}

StepLog::~StepLog() {
  if (impl_) impl_->clear_progress();
}

void StepLog::comment(const std::string& text) {
  if (!impl_) return;
  impl_->clear_progress();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) impl_->logger->info("# {}", line);
}

void StepLog::step(const StepFields& fields) {
  if (!impl_) return;
  std::string line;
  for (const auto& [key, value] : fields) line += (line.empty() ? "" : " ") + key + "=" + value;
  impl_->clear_progress();
  impl_->logger->info("{}", line);
}

void StepLog::progress(std::int64_t step, std::int64_t steps, double seconds_left) {
  if (!impl_ || !impl_->terminal) return;
  const int width = 30, done = steps > 0 ? static_cast<int>(width * step / steps) : width;
  std::string left;
  if (seconds_left >= 0) {
    const auto s = static_cast<std::int64_t>(seconds_left + 0.5);
    left = fmt::format("  {}:{:02}:{:02} left", s / 3600, s / 60 % 60, s % 60);
  }
  fmt::print(stderr, "\r\033[K[{:=<{}}{:<{}}] {}/{}{}", "", done, "", width - done, step, steps,
             left);
}

}  // namespace ballast
