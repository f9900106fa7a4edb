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

#include "io/checkpoint/checkpoint_folder.hpp"
#include "io/files/text_file.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace fs = std::filesystem;
namespace {

/// Takes the lock of an open file.  Returns 0, EWOULDBLOCK where another holds it, or why not.
int take_lock(int descriptor) {
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

/// Whether the file system has no locks.
bool lacks_locks(int code) { return code == ENOSYS || code == EOPNOTSUPP || code == ENOLCK; }

/// What keeps this run out of `path`, or "".  Leaves the lock's descriptor in `lock`.
std::string claim(const std::string& path, bool resume, int& lock) {
  const char* remedy = resume ? "its run goes on once it can" : "choose another with -d";
  std::error_code error;
  for (const char* sub : {"", "/checkpoints", "/trace", "/report"}) {
    fs::create_directories(path + sub, error);
    if (error)
      return fmt::format("run folder {}{} cannot be made: {}; {}", path, sub, error.message(),
                         remedy);
  }
  const std::string file = path + "/lock";
  lock = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock < 0)
    return fmt::format("run folder {} cannot be written: {}; {}", path, std::strerror(errno),
                       remedy);
  const int code = take_lock(lock);
  if (code == EWOULDBLOCK)
    return fmt::format(
        "run folder {} is in use by another run (it holds {}); wait for it or choose another "
        "folder with -d",
        path, file);
  if (lacks_locks(code))
    fmt::print(
        stderr,
        "ballast: warning: {} cannot be locked: {}; see that no other run uses this folder\n", file,
        std::strerror(code));
  else if (code != 0)
    return fmt::format("{} cannot be locked: {}; {}", file, std::strerror(code), remedy);
  // An empty log without checkpoints is of a run that began to write and could not.
  const std::string log = path + "/log.txt", checkpoints = path + "/checkpoints";
  const bool logged = fs::exists(log) && (!fs::is_regular_file(log) || fs::file_size(log) > 0 ||
                                          !fs::is_empty(checkpoints));
  if (!resume && (logged || !checkpoint_steps(checkpoints).empty() || holds_damaged(checkpoints)))
    return fmt::format(
        "run folder {} already holds a run; continue it with -r latest, or choose another folder "
        "with -d",
        path);
  return "";
}

std::string text_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Writes `text` over what a file holds.  Its own blocks are taken, which a full disk still has,
/// so it is cut only afterwards.  Returns whether it holds `text` now.
bool overwrite(const std::string& file, const std::string& text) {
  // O_NONBLOCK: what stands there under this name may be a pipe that nobody reads.
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return false;
  const auto size = static_cast<ssize_t>(text.size());
  const bool written =
      ::write(descriptor, text.data(), text.size()) == size && ::ftruncate(descriptor, size) == 0;
  return ::close(descriptor) == 0 && written;
}

}  // namespace

RunFolder::RunFolder(const Communicator& world, const std::string& path, bool resume)
    : path_(path), rank_(world.rank()) {
  std::error_code ignored;
  if (fs::is_regular_file(status_file(), ignored)) status_before_ = text_of(status_file());
  std::string problem;
  if (world.rank() == 0) problem = claim(path, resume, lock_);
  if (!problem.empty() && lock_ >= 0) {
    ::close(lock_);
    lock_ = -1;
  }
  check_all(world, problem.empty(), problem);
  place_ = place_of(path);
}

bool RunFolder::stands() {
  if (lock_ < 0) return true;
  // Storage that is away may come back: until then checkpoints fail.
  const auto folder = place_of(path_);
  if (!folder) return true;
  if (place_ && *folder != *place_) return false;
  const std::string file = path_ + "/lock";
  if (const auto there = place_of(file); there || errno != ENOENT) {
    const auto held = place_of(lock_);
    return !there || !held || *there == *held;
  }
  const int fresh = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fresh < 0) return true;
  if (const int code = take_lock(fresh); code != 0 && !lacks_locks(code)) {
    ::close(fresh);
    return code != EWOULDBLOCK;
  }
  ::close(std::exchange(lock_, fresh));
  return true;
}

std::string RunFolder::write_deck(const std::string& text) const {
  if (std::error_code ignored; fs::exists(deck(), ignored) && !fs::is_regular_file(deck(), ignored))
    return fmt::format("{}: is no regular file", deck());
  const std::string why = write_text(deck(), text);
  return why.empty() ? "" : fmt::format("{}: cannot be written: {}", deck(), why);
}

bool RunFolder::write(const std::string& state, std::int64_t step, const std::string& checkpoint,
                      const std::string& why) const {
  nlohmann::ordered_json status{{"state", state}, {"step", step}, {"checkpoint", checkpoint}};
  if (!why.empty()) status["why"] = why;
  const std::string text =
      status.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
  if (write_text(status_file(), text, fmt::format(".new{}", rank_)).empty()) return true;
  if (overwrite(status_file(), text)) return true;
  // What an earlier session or step said must not stand for this one.
  std::error_code ignored;
  fs::remove(status_file(), ignored);
  return false;
}

void RunFolder::write_status(const std::string& state, std::int64_t step,
                             const std::string& checkpoint, const std::string& why) {
  if (lock_ < 0 || !stands()) return;
  if (!write(state, step, checkpoint, why) && !std::exchange(warned_, true))
    fmt::print(stderr, "ballast: warning: {} cannot be written\n", status_file());
}

void RunFolder::leave_word(std::int64_t step, const std::string& checkpoint,
                           const std::string& why) const {
  if (const auto there = place_of(path_); place_ && there && *there != *place_)
    return;  // another run's
  std::error_code ignored;
  const std::string text =
      fs::is_regular_file(status_file(), ignored) ? text_of(status_file()) : "";
  const auto said = nlohmann::json::parse(text, nullptr, false);
  if (text != status_before_ && said.is_object() && said.value("state", "") == "failed") return;
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
