// Schedule: per pipeline stage an ordered list of ops, transfers explicit and matched.  The
// executor walks it, the simulator times it, the trace reports it op by op.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ballast {

enum class OpKind {
  forward,
  recompute,
  backward,
  backward_input,
  backward_weight,
  send,
  recv,
  offload,
  fetch,
  collective  ///< all data-parallel ranks of the stage meet; Op::micro_batch is the round
};
const char* name(OpKind kind);
/// Whether an op computes; the others move tensors.
inline bool computes(OpKind kind) { return kind <= OpKind::backward_weight; }
/// Whether a micro-batch's parameter gradients are complete after an op.
inline bool completes_gradients(OpKind kind) {
  return kind == OpKind::backward || kind == OpKind::backward_weight;
}

/// What a transfer carries: stage outputs forward, their gradients backward.
enum class Payload { none, activation, gradient };

struct Op {
  OpKind kind = OpKind::forward;
  int micro_batch = 0;  ///< place in the data-parallel rank's list
  int chunk = 0;        ///< index of the dependent chunk inside its sample, 0 for standalone
  int peer = -1;        ///< stage at the other end of a transfer
  Payload payload = Payload::none;
  bool operator==(const Op&) const = default;
};

/// [op] Whether an op of a stage's list is the last that adds to gradients before they are reduced,
/// by the collective of a round or, in a list without collectives, at its end: buckets can be
/// reduced while such a backward runs.  A backward may have its sends behind it, which wait then; a
/// weight half may not, since they are another micro-batch's.
std::vector<char> ends_gradients(const std::vector<Op>& ops);

struct Schedule {
  std::vector<std::vector<Op>> stages;
  std::uint64_t hash() const;
};

/// Durations for the simulator, in seconds (any unit will do as long as it is one).
struct ScheduleCosts {
  std::function<double(int stage, const Op&)> duration;
};

struct TimedOp {
  Op op;
  double begin_s = 0, end_s = 0;
};

struct SimulatedSchedule {
  std::vector<std::vector<TimedOp>> stages;
  double step_time_s = 0;
  double bubble_ratio =
      0;  ///< 1 - useful / (stages * step time); recomputation, transfers and waits count as bubble
  /// Per stage: forwards and recomputes whose backward is still to come.  A forward that a
  /// recompute follows keeps no activations.
  std::vector<int> peak_live_activations;
  /// Per stage: the most of them at once whose input half is done and whose weight half is still to
  /// come.
  std::vector<int> peak_weight_halves;
};

/// Runs every stage's list in order; a recv waits for its matching send (same micro-batch and
/// payload).  Sends are posted and cost the receiver `duration` from then on.  Throws Error naming
/// the blocked ops when the lists deadlock.
SimulatedSchedule simulate(const Schedule& schedule, const ScheduleCosts& costs);

/// Unmatched transfers, a backward before its forward and the like; empty when well formed.
std::string problems(const Schedule& schedule);

}  // namespace ballast
