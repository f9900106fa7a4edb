// How long a wait has lasted, without the time in which this process did not run.
#pragma once

namespace ballast {

/// Seconds of one wait, told from readings of a clock.  A job that is suspended as a whole
/// (SIGSTOP, Slurm's suspend) finds a gap between two readings once it is resumed.  Nobody was late
/// then, so a gap above kMostGapS does not count.  Who waits must therefore read the clock far more
/// often than that: a longer sleep would be taken for a suspension, and the wait would never end.
class WaitClock {
 public:
  static constexpr double kMostGapS = 1;
  explicit WaitClock(double now_s) { restart(now_s); }
  /// The wait begins anew.
  void restart(double now_s) { since_s_ = read_s_ = now_s; }
  /// Takes a reading, and returns the seconds that the wait has lasted.
  double waited_s(double now_s) {
    if (now_s - read_s_ > kMostGapS) since_s_ += now_s - read_s_;
    read_s_ = now_s;
    return now_s - since_s_;
  }

 private:
  double since_s_ = 0, read_s_ = 0;
};

}  // namespace ballast
