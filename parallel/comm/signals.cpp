#include "parallel/comm/signals.hpp"

#include <csignal>

namespace ballast {
namespace {

volatile std::sig_atomic_t g_terminate = 0, g_user = 0;

extern "C" void note_signal(int signal) { (signal == SIGTERM ? g_terminate : g_user) = 1; }

}  // namespace

const char* name(StopReason reason) {
  switch (reason) {
    case StopReason::none:
      return "";
    case StopReason::wall_time:
      return "wall-time limit";
    case StopReason::user_signal:
      return "SIGUSR1";
    case StopReason::terminate:
      return "SIGTERM";
  }
  return "";
}

void catch_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;  // reads and writes under way go on
  sigemptyset(&action.sa_mask);
  for (int signal : {SIGTERM, SIGUSR1})
    require(sigaction(signal, &action, nullptr) == 0, "signal {} cannot be caught", signal);
}

StopReason agreed_stop(const Communicator& comm, bool past_deadline) {
  const StopReason mine = g_terminate     ? StopReason::terminate
                          : g_user        ? StopReason::user_signal
                          : past_deadline ? StopReason::wall_time
                                          : StopReason::none;
  return static_cast<StopReason>(comm.all_reduce(static_cast<std::int64_t>(mine), Reduction::max));
}

}  // namespace ballast
