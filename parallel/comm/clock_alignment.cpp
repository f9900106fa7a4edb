#include "parallel/comm/clock_alignment.hpp"

#include <limits>

namespace ballast {
namespace {

void transfer(const Communicator& comm, double& value, int peer, bool send) {
  const Transfer one{Tensor::wrap(&value, {1}, DType::f64), peer, send};
  comm.exchange({&one, 1}).complete();
}

}  // namespace

double align_clocks(const Communicator& comm, Clock& clock, int rounds) {
  const auto now = [&] { return clock.seconds(clock.mark()); };
  double offset = 0;
  // One rank after another, so that no answer waits for somebody else's.
  for (int peer = 1; peer < comm.size(); ++peer) {
    double shortest = std::numeric_limits<double>::infinity(), theirs = 0;
    if (comm.rank() == 0) {
      for (int round = 0; round < rounds; ++round) {
        double sent = now();
        transfer(comm, sent, peer, true);
        transfer(comm, theirs, peer, false);
        const double received = now();
        if (received - sent >= shortest) continue;
        shortest = received - sent;
        offset = 0.5 * (sent + received) - theirs;
      }
      transfer(comm, offset, peer, true);
      offset = 0;
    } else if (comm.rank() == peer) {
      for (int round = 0; round < rounds; ++round) {
        transfer(comm, theirs, 0, false);
        double here = now();
        transfer(comm, here, 0, true);
      }
      transfer(comm, offset, 0, false);
    }
    comm.barrier();
  }
  return offset;
}

}  // namespace ballast
