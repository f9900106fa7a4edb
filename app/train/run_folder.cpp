#include "app/train/run_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "parallel/comm/waits.hpp"

namespace ballast {
namespace fs = std::filesystem;
namespace {

/// What keeps this run out of `path`, or "".  Leaves the lock's descriptor in `lock`.
std::string claim(const std::string& path, bool resume, int& lock) {
  std::error_code error;
  for (const char* sub : {"", "/checkpoints", "/trace", "/report"}) {
    fs::create_directories(path + sub, error);
    if (error)
      return fmt::format("run folder {}{} cannot be made: {}; choose another with -d", path, sub,
                         error.message());
  }
  const std::string file = path + "/lock";
  lock = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock < 0)
    return fmt::format("run folder {} cannot be written: {}; choose another with -d", path,
                       std::strerror(errno));
  if (::flock(lock, LOCK_EX | LOCK_NB) != 0)
    return fmt::format(
        "run folder {} is in use by another run (it holds {}); wait for it or choose another "
        "folder with -d",
        path, file);
  // An empty log without checkpoints is of a run that began to write and could not.
  const std::string log = path + "/log.txt";
  if (!resume && fs::exists(log) &&
      (!fs::is_regular_file(log) || fs::file_size(log) > 0 || !fs::is_empty(path + "/checkpoints")))
    return fmt::format(
        "run folder {} already holds a run; continue it with -r latest, or choose another folder "
        "with -d",
        path);
  return "";
}

}  // namespace

RunFolder::RunFolder(const Communicator& world, const std::string& path, bool resume)
    : path_(path), rank_(world.rank()) {
  std::string problem;
  if (world.rank() == 0) problem = claim(path, resume, lock_);
  if (!problem.empty() && lock_ >= 0) {
    ::close(lock_);
    lock_ = -1;
  }
  check_all(world, problem.empty(), problem);
}

bool RunFolder::write(const std::string& state, std::int64_t step, const std::string& checkpoint,
                      const std::string& why) const {
  nlohmann::ordered_json status{{"state", state}, {"step", step}, {"checkpoint", checkpoint}};
  if (!why.empty()) status["why"] = why;
  const std::string fresh = fmt::format("{}.new{}", status_file(), rank_);
  std::ofstream out(fresh);
  out << status.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
  out.close();
  std::error_code error;
  if (out) fs::rename(fresh, status_file(), error);
  return out && !error;
}

void RunFolder::write_status(const std::string& state, std::int64_t step,
                             const std::string& checkpoint, const std::string& why) {
  if (lock_ < 0) return;
  if (!write(state, step, checkpoint, why) && !std::exchange(warned_, true))
    fmt::print(stderr, "ballast: warning: {} cannot be written\n", status_file());
}

void RunFolder::leave_word(std::int64_t step, const std::string& checkpoint,
                           const std::string& why) const {
  std::ifstream stream(status_file());
  const auto said = nlohmann::json::parse(stream, nullptr, false);
  if (said.is_object() && said.value("state", "") == "failed") return;
  if (checkpoint.empty() && said.is_object())  // while a run starts, its last session's hold
    write("failed", said.value("step", step), said.value("checkpoint", ""), why);
  else
    write("failed", step, checkpoint, why);
}

RunFolder::~RunFolder() {
  if (lock_ >= 0)
    ::close(
        lock_);  // releases the lock; the file stays, so that two runs never race for its removal
}

}  // namespace ballast
