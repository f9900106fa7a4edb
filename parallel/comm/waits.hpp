// How a rank waits, gives up, and takes the others with it.
#pragma once
#include <mpi.h>

#include <functional>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/observe/events.hpp"

namespace ballast {

/// Waits for MPI requests without starving other ranks of the core: test, then yield.  Every wait
/// in Ballast goes through here.  After `set_wait_limit` seconds without progress the rank reports
/// its last event and aborts the job; time in which the job was suspended does not count.
void wait_all(std::vector<MPI_Request>& requests);
/// The same, leaving the status of each request.
void wait_all(std::vector<MPI_Request>& requests, std::vector<MPI_Status>& statuses);
/// Seconds without progress (600 until set), and whose last event is reported; `recorder` must live
/// as long as ranks wait.
void set_wait_limit(double seconds, const Recorder* recorder = nullptr);
/// The seconds of set_wait_limit.
double wait_limit();
/// Holds a limit and a recorder while it lives; the limit stays, the recorder does not.
class WaitWatch {
 public:
  WaitWatch(double seconds, const Recorder& recorder) { set_wait_limit(seconds, &recorder); }
  ~WaitWatch() { set_wait_limit(wait_limit()); }
  WaitWatch(const WaitWatch&) = delete;
  WaitWatch& operator=(const WaitWatch&) = delete;
};
/// Puts the host's waits for the GPU under the same limit, and lets them see errors of NCCL.
/// set_wait_limit and NCCL's first use call it.
void watch_gpu_waits();
/// Throws Error for an MPI return code other than MPI_SUCCESS.
void check_mpi(int code, const char* what);

/// While it lives: what a rank does last that ends the run alone (fail_here, a wait without
/// progress): `words` gets what it prints, in a thread of its own that has two seconds, for storage
/// may be what hangs.
class LastWords {
 public:
  explicit LastWords(std::function<void(const std::string&)> words);
  ~LastWords();
  LastWords(const LastWords&) = delete;
  LastWords& operator=(const LastWords&) = delete;
};

class Communicator;

/// An Error that every rank of the run throws together: main prints it once, from rank 0, and all
/// leave.  Any other Error is one rank's alone: main hands it to fail_here.
class CollectiveError : public Error {
 public:
  using Error::Error;
};

/// Collective: when any rank's condition is false, every rank throws CollectiveError with the
/// message of the lowest such rank.
void check_all(const Communicator& comm, bool condition, const std::string& message);
/// Collective: runs `work` on every rank, and all ranks throw CollectiveError when it throws on
/// one.
void together(const Communicator& comm, const std::function<void()>& work);
/// Name of this machine, for tables and messages.
std::string host_name();
/// One rank: prints rank, host, message and (outside a catch block) the last event, then aborts all
/// ranks with a non-zero status.  Where all ranks come here with one mistake, rank 0 speaks for
/// them.
[[noreturn]] void fail_here(const std::string& message);

}  // namespace ballast
