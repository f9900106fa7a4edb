// Clock alignment: how far this rank's clock is from rank 0's.
#pragma once
#include "core/observe/events.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Seconds to add to this rank's `clock` to read rank 0's (for Recorder::set_offset): from the
/// ping-pong with the shortest round trip of `rounds`, of which half counts as one way (Cristian,
/// Distributed Computing 1989); the error is below half that round trip.  0 on rank 0. Collective.
double align_clocks(const Communicator& comm, Clock& clock = host_clock(), int rounds = 24);

}  // namespace ballast
