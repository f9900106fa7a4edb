// Second level of the clock: the operations of lanes.  Every stage of a lane goes through its list;
// a receive waits for its send, an operation on a shared micro-batch for all ranks of its group, a
// collective between rounds for all replicas, a recompute for the fetch of its input.
#pragma once
#include <memory>
#include <vector>

#include "core/plan/pipeline/schedule.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/micro_batch_times.hpp"

namespace ballast {

/// One stage of one data-parallel rank.
struct LaneStage {
  double end_s = 0;       ///< of its last operation
  double first_s = 0;     ///< begin of its first computation
  double last_s = 0;      ///< end of its last one; 0: there is none
  PassParts parts;        ///< what its operations spend their time on
  double useful_s = 0;    ///< computation of forwards and backwards, what these make again included
  double round_s = 0;     ///< collectives between rounds
  int live = 0;           ///< most micro-batches at once whose activations it holds
  int weight_halves = 0;  ///< most of them whose input half is done and whose weight half is not
  std::vector<TimedOp> ops;  ///< empty unless they are kept
};

struct LaneClockInputs {
  const StepPlan& plan;
  /// [micro-batch id]
  const std::vector<std::shared_ptr<const MicroBatchTimes>>& times;
  /// [stage][round]: seconds of the collectives of a round, at their places in the schedules.
  std::vector<std::vector<double>> round_s;
  bool keep_ops = true;
};

/// [dp][stage].  Lanes with the same schedule over the same times are worked out once; lanes that
/// share micro-batches, or meet between rounds, together.  Error: lists that deadlock, with the
/// operations that wait for one another.
std::vector<std::vector<LaneStage>> run_lanes(const LaneClockInputs& inputs);

}  // namespace ballast
