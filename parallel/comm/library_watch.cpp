#include "parallel/comm/library_watch.hpp"

#include <fmt/format.h>
#include <mpi.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/wait_clock.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

/// Of one sleep of a watch: far below the gap by which WaitClock knows a suspended process.
constexpr double kSleepS = 0.2;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

LibraryWatch::LibraryWatch(double limit_s, std::string message, int status) {
  // Signals are for the thread that trains.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread(
        [this, limit_s, message = std::move(message), status] { watch(limit_s, message, status); });
  } catch (const std::system_error&) {  // no more threads: nobody watches
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

LibraryWatch::~LibraryWatch() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void LibraryWatch::watch(double limit_s, const std::string& message, int status) {
  std::unique_lock lock(mutex_);
  WaitClock clock(now_s());
  for (double left_s = limit_s; left_s > 0; left_s = limit_s - clock.waited_s(now_s())) {
    const std::chrono::duration<double> sleep(std::min(left_s, kSleepS));
    if (changed_.wait_for(lock, sleep, [&] { return over_; })) return;
  }
  // Not through stdio: whoever stands still may hold its lock.
  [[maybe_unused]] const auto told = ::write(STDERR_FILENO, message.data(), message.size());
  std::_Exit(status);
}

CallWatch::CallWatch(const char* call)
    : LibraryWatch(wait_limit(),
                   fmt::format("ballast: rank {} on {}: waited {:.1f} s for other ranks in {} "
                               "(run.hang_timeout_s)\n",
                               launched_rank(), host_name(), wait_limit(), call),
                   1) {}

int launched_rank() {
  for (const char* variable : {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"})
    if (const char* text = std::getenv(variable)) return std::atoi(text);
  return 0;
}

void start_mpi(int* argc, char*** argv, double limit_s) {
  const int rank = launched_rank();
  // The first to lose patience ends the others, so that one message is printed.
  const double own_s = limit_s + std::min(4.0, 1.0 * rank);
  {
    const LibraryWatch watch(
        own_s,
        fmt::format("ballast: rank {} on {}: MPI has not started for {:.1f} s: another process was "
                    "not started, or stands still; a longer limit: run.hang_timeout_s=SECONDS on "
                    "the command line\n",
                    rank, host_name(), own_s),
        1);
    MPI_Init(argc, argv);
  }
  // Return codes are checked, so that messages are ours.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
}

void end_mpi(int status, double limit_s) {
  // MPI_Finalize has no form that yields or can be left: let all be here before it begins.
  std::vector<MPI_Request> requests(1);
  check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, requests.data()), "the barrier before MPI's end");
  wait_all(requests);
  std::string message;
  if (launched_rank() == 0)
    message = fmt::format(
        "ballast: note: MPI_Finalize has not returned for {:.0f} s; everything is written, and the "
        "run ends with its own status, {}\n",
        limit_s, status);
  const LibraryWatch watch(limit_s, std::move(message), status);
  MPI_Finalize();
}

void watch_exit(int status, double limit_s) {
  // Never destroyed: its thread ends with the process, after the last exit handler.
  [[maybe_unused]] static const LibraryWatch* const watch = new LibraryWatch(
      limit_s,
      fmt::format("ballast: note: rank {} on {} has not left for {:.0f} s after MPI's end: a "
                  "library's exit handler stands still; everything is written, and the process "
                  "ends with its own status, {}\n",
                  launched_rank(), host_name(), limit_s, status),
      status);
}

}  // namespace ballast
