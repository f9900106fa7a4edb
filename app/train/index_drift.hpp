// Drift of sparse indexes: on one held-out sample, what the index of an earlier step holds of
// today's attention against what today's holds.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "app/observe/recall_rows.hpp"
#include "app/train/session.hpp"
#include "app/train/step_planner.hpp"

namespace ballast {

class IndexDrift {
 public:
  /// Of sample `sample`; both must outlive it.
  IndexDrift(Session& session, StepPlanner& planner, std::int64_t sample)
      : session_(session), planner_(planner), sample_(sample) {}
  /// Runs the sample forward with the present weights, measures its indexes and those of the call
  /// before (none in the first), and keeps them.  Rows of this rank's heads, the same on every rank
  /// of a ring.  Collective.
  std::vector<DriftRow> measure();

 private:
  Session& session_;
  StepPlanner& planner_;
  const std::int64_t sample_;
  std::map<std::pair<int, int>, std::vector<AttentionWork>> before_;  ///< by micro-batch and layer
};

}  // namespace ballast
