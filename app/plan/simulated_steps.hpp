// The first steps of a deck as the simulator times them: their means for JSON, and a trace of every
// rank that ballast-report reads like that of a run.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/plan/run_summary.hpp"
#include "core/config/config.hpp"
#include "core/observe/events.hpp"
#include "core/plan/context/mesh_shape.hpp"
#include "core/predict/simulate.hpp"

namespace ballast {

class SimulatedSteps {
 public:
  /// Plans and times `count` steps of a deck that has data.  Errors: those of the plan and of its
  /// costs.
  SimulatedSteps(const Config& config, std::int64_t count);

  /// {"steps", "step_s", "schedule_s", "load_balance", "idle_ranks", "bubble_ratio",
  /// "tokens_per_s", "terms": {name: seconds}}: means over the steps, bubble_ratio and the rate of
  /// all of them together; terms add up to step_s.
  nlohmann::ordered_json json() const;

  /// Makes FOLDER for write_trace, so that one that cannot be made is known before steps are
  /// simulated; false: it stood there.  Errors: that, and a folder that holds a trace.
  static bool prepare_trace(const std::string& folder);

  /// Writes FOLDER/trace, a file a rank, and FOLDER/deck.toml.  A rank's operations are those of
  /// its lane and stage; what rings and exchanges add is laid at the end of each operation, in
  /// proportion; reduction, optimizer and gather end the step.  Memory is that of `facts`.
  /// Errors: files that cannot be written.
  void write_trace(const std::string& folder, const CheckFacts& facts) const;

 private:
  struct Step {
    StepPlan plan;
    SimulatedStep simulated;
  };
  std::vector<Event> events(std::int64_t step, const MeshCoordinates& at, double begin_s) const;

  const Config& config_;
  std::vector<Step> steps_;
};

}  // namespace ballast
