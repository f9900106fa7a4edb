#include "parallel/comm/waits.hpp"

#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>

#include "core/base/wait_clock.hpp"
#include "parallel/comm/comm.hpp"

#ifdef BALLAST_HAVE_CUDA
#include "kernels/cuda/runtime/device.hpp"
#endif
#ifdef BALLAST_HAVE_NCCL
#include "parallel/comm/nccl_group.hpp"
#endif

namespace ballast {
namespace {

double g_limit_s = 600;
const Recorder* g_recorder = nullptr;
std::function<void(const std::string&)> g_last_words;

bool mpi_runs() {
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  return initialised && !finalised;
}

std::string who() {
  int rank = -1;
  if (mpi_runs()) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return fmt::format("rank {} on {}", rank, host_name());
}

/// Inside a catch block the recorder may have gone with the stack that threw.
std::string last_event() {
  if (!g_recorder || std::current_exception()) return "";
  return "; last event: " + g_recorder->last_event();
}

void print(const std::string& line) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", line.c_str());
  std::fflush(stderr);
}

/// The launcher ends everyone once a rank aborts, whether or not it has read what the rank printed
/// last: gives it up to two seconds to empty the pipe.
void let_the_launcher_read() {
  int unread = 0;
  for (int i = 0; i < 100 && ::ioctl(STDERR_FILENO, FIONREAD, &unread) == 0 && unread > 0; ++i)
    usleep(20000);
  usleep(100000);  // on its way from one process of the launcher to the next
}

[[noreturn]] void abort_all() {
  let_the_launcher_read();
  if (mpi_runs()) MPI_Abort(MPI_COMM_WORLD, 1);
  std::_Exit(1);
}

/// Prints the error that ends the run, and leaves word of it.
void say_last(const std::string& message) {
  const std::string line = fmt::format("{}: {}{}", who(), message, last_event());
  print("ballast: " + line);
  if (!g_last_words) return;
  const auto done = std::make_shared<std::atomic<bool>>(false);
  const auto speak = [done, line] {
    try {
      g_last_words(line);
    } catch (...) {  // the message stands
    }
    *done = true;
  };
  try {
    std::thread(speak).detach();
  } catch (const std::system_error&) {  // no more threads
    speak();
  }
  for (int i = 0; i < 200 && !*done; ++i) usleep(10000);
}

/// Ends the run: nothing came of a wait for `whom`.
[[noreturn]] void give_up(double waited_s, const char* whom) {
  say_last(
      fmt::format("waited {:.1f} s for {} without progress (run.hang_timeout_s)", waited_s, whom));
  // Ranks that wait for the same culprit lose patience about now; whoever prints nothing is dead or
  // stuck outside a wait.
  usleep(static_cast<useconds_t>(1e6 * std::clamp(0.1 * g_limit_s, 0.2, 3.0)));
  abort_all();
}

/// Throws Error when transfers between GPUs have failed.
void check_transfers() {
#ifdef BALLAST_HAVE_NCCL
  NcclGroup::check_health();
#endif
}

/// Yields between tests, and keeps the time since something last completed.
class Patience {
 public:
  void restart() { polls_ = 0; }
  void yield() {
    // The clock is read every time: on a busy machine some hundred yields can last longer than the
    // gap by which WaitClock knows a suspended process.
    const double now_s = MPI_Wtime();
    if (polls_ == 0) clock_.restart(now_s);
    if (const double waited_s = clock_.waited_s(now_s); waited_s > g_limit_s)
      give_up(waited_s, "other ranks");
    // Once in a while: a test of requests takes well below a microsecond.
    if (++polls_ % 256 == 1) check_transfers();
    sched_yield();
  }

 private:
  std::int64_t polls_ = 0;
  WaitClock clock_{0};
};

}  // namespace

std::string host_name() {
  char text[256] = "";
  return gethostname(text, sizeof text - 1) == 0 ? text : "unknown";
}

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail("{}: {} failed: {}", who(), what, std::string(text, static_cast<std::size_t>(length)));
}

void wait_all(std::vector<MPI_Request>& requests) {
  std::vector<MPI_Status> statuses;
  wait_all(requests, statuses);
}

void wait_all(std::vector<MPI_Request>& requests, std::vector<MPI_Status>& statuses) {
  const int count = static_cast<int>(requests.size());
  statuses.resize(requests.size());
  std::vector<int> completed(requests.size());
  std::vector<MPI_Status> now(requests.size());
  Patience patience;
  for (;;) {
    int some = 0;
    const int code = MPI_Testsome(count, requests.data(), &some, completed.data(), now.data());
    if (code == MPI_ERR_IN_STATUS)
      for (int i = 0; i < some; ++i) check_mpi(now[i].MPI_ERROR, "a transfer");
    check_mpi(code, "MPI_Testsome");
    if (some == MPI_UNDEFINED) return;  // nothing is active any more
    for (int i = 0; i < some; ++i) statuses[completed[i]] = now[i];
    if (some > 0)
      patience.restart();
    else
      patience.yield();
  }
}

void set_wait_limit(double seconds, const Recorder* recorder) {
  require(seconds > 0, "the wait limit must be positive, got {} s", seconds);
  g_limit_s = seconds;
  g_recorder = recorder;
  watch_gpu_waits();
}

double wait_limit() { return g_limit_s; }

LastWords::LastWords(std::function<void(const std::string&)> words) {
  g_last_words = std::move(words);
}
LastWords::~LastWords() { g_last_words = nullptr; }

void watch_gpu_waits() {
#ifdef BALLAST_HAVE_CUDA
  cuda::set_wait_watch([](double waited_s) {
    check_transfers();
    if (waited_s > g_limit_s)
      give_up(waited_s,
              "the GPU, whose work may itself wait for other ranks or last longer than the limit,");
  });
#endif
}

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this == &other) return *this;
  finish();
  complete_ = std::move(other.complete_);
  done_ = std::move(other.done_);
  other.complete_ = nullptr;
  return *this;
}

Pending::~Pending() { finish(); }

void Pending::complete() {
  if (!complete_) return;
  const auto call = std::move(complete_);
  complete_ = nullptr;
  call();
}

bool Pending::test() {
  if (complete_ && done_()) complete();
  return !complete_;
}

void Pending::finish() noexcept {
  if (!complete_) return;
  if (std::uncaught_exceptions() > 0) {
    // This rank failed with transfers in flight.  Its peers may never answer, so it must not wait;
    // MPI may still write, so the buffers must not go back to the allocator.  The process is on its
    // way out.
    new std::function<void()>(std::move(complete_));
    complete_ = nullptr;
    return;
  }
  try {
    complete();
  } catch (const std::exception& e) {
    fail_here(e.what());
  }
}

void check_all(const Communicator& comm, bool condition, const std::string& message) {
  const std::int64_t size = comm.size();
  const std::int64_t first =
      comm.all_reduce(condition ? size : static_cast<std::int64_t>(comm.rank()), Reduction::min);
  if (first == size) return;
  throw CollectiveError(comm.broadcast(message, static_cast<int>(first)));
}

void together(const Communicator& comm, const std::function<void()>& work) {
  std::string problem;
  bool done = false;
  try {
    work();
    done = true;
  } catch (const std::exception& error) {
    problem = error.what();
  }
  check_all(comm, done, problem);
}

void fail_here(const std::string& message) {
  // Rank 0's abort ends the others while they wait here, so that a mistake that all share is
  // printed once.
  if (Communicator::world().rank() != 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(g_last_words ? 1000 : 300));
  say_last(message);
  abort_all();
}

}  // namespace ballast
