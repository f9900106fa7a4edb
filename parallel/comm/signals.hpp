// Stopping early: signals and the wall-time limit, agreed on by all ranks between two steps.
#pragma once
#include "parallel/comm/comm.hpp"

namespace ballast {

enum class StopReason { none, wall_time, user_signal, terminate };
/// "wall-time limit", "SIGUSR1", "SIGTERM"; "" for none.
const char* name(StopReason reason);

/// From now on SIGTERM and SIGUSR1 only set a flag that agreed_stop reads.  Call on every rank.
void catch_stop_signals();

/// Whether to stop now, the same answer on all ranks: a signal that reached any one of them since
/// catch_stop_signals (it stays set), or `past_deadline` on any one.  Collective: one small
/// reduction, so call it at a step's end.
StopReason agreed_stop(const Communicator& comm, bool past_deadline);

}  // namespace ballast
