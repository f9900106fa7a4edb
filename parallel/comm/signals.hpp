// Stopping early: signals and the wall-time limit, agreed on by all ranks between two steps.
#pragma once
#include "parallel/comm/comm.hpp"

namespace ballast {

enum class StopReason { none, wall_time, user_signal, interrupt, hang_up, terminate };
/// "wall-time limit", "SIGUSR1", "SIGINT", "SIGHUP", "SIGTERM"; "" for none.
const char* name(StopReason reason);

/// Seconds since this process had its libraries loaded.
double process_seconds();

/// From now on SIGTERM, SIGUSR1 and SIGINT only set a flag that agreed_stop reads; a second SIGINT,
/// half a second or more after the first, ends the process.  Call on every rank, before MPI starts:
/// with many ranks that takes minutes, in which a signal would end the job.
void catch_stop_signals();

/// Whether to stop now, the same answer on all ranks: a signal that reached any one of them since
/// catch_stop_signals (it stays set), or `past_deadline` on any one.  Collective: one small
/// reduction, so call it at a step's end.
StopReason agreed_stop(const Communicator& comm, bool past_deadline);

}  // namespace ballast
