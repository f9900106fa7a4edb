#include "parallel/comm/messages.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "parallel/comm/waits.hpp"

namespace ballast {
namespace {

std::size_t g_message_bytes = std::size_t{1} << 30;  // counts of MPI are int

template <class F>
void in_parts(std::size_t bytes, F&& f) {
  for (std::size_t at = 0; at < bytes; at += g_message_bytes)
    f(at, static_cast<int>(std::min(g_message_bytes, bytes - at)));
}

}  // namespace

void set_largest_message(std::int64_t bytes) {
  require(bytes >= 1 && bytes <= std::int64_t{1} << 30,
          "messages of at most {} bytes: must lie in [1, 2^30]", bytes);
  g_message_bytes = static_cast<std::size_t>(bytes);
}

std::size_t largest_message() { return g_message_bytes; }

void Messages::send(const void* data, std::size_t bytes, int peer) {
  in_parts(bytes, [&](std::size_t at, int count) {
    check_mpi(MPI_Isend(static_cast<const char*>(data) + at, count, MPI_BYTE, peer, tag_, comm_,
                        &add(-1)),
              "MPI_Isend");
  });
}

void Messages::receive(void* data, std::size_t bytes, int peer) {
  in_parts(bytes, [&](std::size_t at, int count) {
    check_mpi(
        MPI_Irecv(static_cast<char*>(data) + at, count, MPI_BYTE, peer, tag_, comm_, &add(count)),
        "MPI_Irecv");
  });
}

bool Messages::arrived() {
  if (taken_) return true;
  int all = 0;
  statuses_.resize(requests_.size());
  check_mpi(
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &all, statuses_.data()),
      "MPI_Testall");
  return taken_ = all != 0;
}

void Messages::wait() {
  std::vector<MPI_Status> statuses;
  if (taken_)
    statuses = statuses_;
  else
    wait_all(requests_, statuses);
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (expected_[i] < 0) continue;
    int got = 0;
    check_mpi(MPI_Get_count(&statuses[i], MPI_BYTE, &got), "MPI_Get_count");
    require(got == expected_[i],
            "rank {} sent {} bytes where {} were expected: the ranks disagree on a tensor's shape",
            statuses[i].MPI_SOURCE, got, expected_[i]);
  }
  requests_.clear();
  expected_.clear();
}

MPI_Request& Messages::add(int expected) {
  expected_.push_back(expected);
  return requests_.emplace_back(MPI_REQUEST_NULL);
}

}  // namespace ballast
