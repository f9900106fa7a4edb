// Calls into the MPI library that wait for other ranks where no helper of ours can: its start,
// its end and the making of communicators, watched by a thread.
#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace ballast {

/// Ends the process unless it is destroyed within `limit_s` seconds in which the process ran:
/// prints `message` (unless it is empty) to the standard error and leaves at once with `status`,
/// without destructors or exit handlers, which might wait for the same thing.
class LibraryWatch {
 public:
  LibraryWatch(double limit_s, std::string message, int status);
  ~LibraryWatch();
  LibraryWatch(const LibraryWatch&) = delete;
  LibraryWatch& operator=(const LibraryWatch&) = delete;

 private:
  void watch(double limit_s, const std::string& message, int status);
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

/// A LibraryWatch of a call that waits for other ranks, under the wait limit (waits.hpp): status 1.
class CallWatch : public LibraryWatch {
 public:
  explicit CallWatch(const char* call);
};

/// This process's number among those that a launcher started, known before MPI is; 0 without a
/// launcher.
int launched_rank();

/// MPI_Init; errors of MPI are return codes from then on.  When another process does not come
/// within `limit_s` seconds the process ends with one message and status 1.
void start_mpi(int* argc, char*** argv, double limit_s);

/// Waits for all ranks under the wait limit (waits.hpp), so that none is still sending, then
/// MPI_Finalize.  By then a run has written everything: where that call stands still for
/// `limit_s` seconds, the process says so (rank 0 alone) and ends with `status`.
void end_mpi(int status, double limit_s);

/// From here to the end of the process, exit handlers of libraries included (CUDA's wait for the
/// driver): after `limit_s` seconds it says so and ends with `status`.  For the end of main.
void watch_exit(int status, double limit_s);

}  // namespace ballast
