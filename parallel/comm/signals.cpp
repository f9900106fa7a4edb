#include "parallel/comm/signals.hpp"

#include <csignal>
#include <ctime>

namespace ballast {
namespace {

volatile std::sig_atomic_t g_terminate = 0, g_user = 0, g_interrupt = 0, g_hang_up = 0;
double g_interrupted_s = 0;

double monotonic_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

const double g_started_s = monotonic_s();

extern "C" void note_signal(int signal) {
  if (signal == SIGINT) {
    // A terminal and the launcher may both deliver one Ctrl-C.
    if (g_interrupt && monotonic_s() - g_interrupted_s > 0.5) {
      std::signal(SIGINT, SIG_DFL);
      raise(SIGINT);
    }
    if (!g_interrupt) g_interrupted_s = monotonic_s();
    g_interrupt = 1;
    return;
  }
  (signal == SIGUSR1 ? g_user : signal == SIGHUP ? g_hang_up : g_terminate) = 1;
}

}  // namespace

const char* name(StopReason reason) {
  switch (reason) {
    case StopReason::none:
      return "";
    case StopReason::wall_time:
      return "wall-time limit";
    case StopReason::user_signal:
      return "SIGUSR1";
    case StopReason::interrupt:
      return "SIGINT";
    case StopReason::hang_up:
      return "SIGHUP";
    case StopReason::terminate:
      return "SIGTERM";
  }
  return "";
}

double process_seconds() { return monotonic_s() - g_started_s; }

void catch_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;  // reads and writes under way go on
  sigemptyset(&action.sa_mask);
  for (int signal : {SIGTERM, SIGUSR1, SIGINT, SIGHUP}) {
    struct sigaction before = {};  // nohup's runs outlive their terminal
    if (signal == SIGHUP && sigaction(signal, nullptr, &before) == 0 &&
        before.sa_handler == SIG_IGN)
      continue;
    require(sigaction(signal, &action, nullptr) == 0, "signal {} cannot be caught", signal);
  }
}

StopReason agreed_stop(const Communicator& comm, bool past_deadline) {
  const StopReason mine = g_terminate     ? StopReason::terminate
                          : g_hang_up     ? StopReason::hang_up
                          : g_interrupt   ? StopReason::interrupt
                          : g_user        ? StopReason::user_signal
                          : past_deadline ? StopReason::wall_time
                                          : StopReason::none;
  return static_cast<StopReason>(comm.all_reduce(static_cast<std::int64_t>(mine), Reduction::max));
}

}  // namespace ballast
