// Messages between ranks, in flight together.
#pragma once
#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ballast {

/// Longer messages travel in parts of this many bytes (2^30 until set: MPI counts in int).  The
/// same on all ranks.
void set_largest_message(std::int64_t bytes);
std::size_t largest_message();

/// Requests in flight; wait() completes them and verifies that every message had the expected size
/// (Error).
class Messages {
 public:
  explicit Messages(MPI_Comm comm, int tag) : comm_(comm), tag_(tag) {}
  void send(const void* data, std::size_t bytes, int peer);
  void receive(void* data, std::size_t bytes, int peer);
  /// Whether all of them have completed; wait() will not wait then.
  bool arrived();
  void wait();

 private:
  MPI_Request& add(int expected);
  MPI_Comm comm_;
  int tag_;
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_;  ///< bytes of a receive, -1 for a send
  std::vector<MPI_Status> statuses_;
  bool taken_ = false;  ///< `statuses_` are those of the completed requests
};

}  // namespace ballast
