// The deck's first global batches on its pipeline, simulated: what `ballast plan` shows of a
// schedule and searches over.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// Seconds of one micro-batch, from a profile table.
struct MicroBatchTimes {
  double layer_forward_s = 0, layer_backward_s = 0;
  double weight_s = 0;  ///< of layer_backward_s: weight gradients
  double head_forward_s = 0, head_backward_s = 0;
  double hop_s = 0;  ///< its activations or gradients to the neighbour stage
};
/// Costs of a list's ops from the times of its micro-batches: products and sums alone, so that
/// ranks with the same times have the same costs.
ScheduleCosts schedule_costs(std::vector<MicroBatchTimes> times,
                             const std::vector<MicroBatch>& list, const RunOptions& options);

/// Times of a stage's ops: from the profile table of the deck (profile.table) where it names one,
/// else from the stated costs.
class StageTimes {
 public:
  /// `notes`: what the table's checks say.  Errors: those of load_profile.
  StageTimes(const Config& config, std::vector<std::string>& notes);
  ScheduleCosts of(const std::vector<MicroBatch>& list, const RunOptions& options) const;
  /// From the table alone.
  std::vector<MicroBatchTimes> measured(const std::vector<MicroBatch>& list,
                                        const RunOptions& options) const;
  const std::string& source() const { return source_; }  ///< where they come from, for titles

 private:
  std::optional<LatencyModel> model_;
  std::string source_;
  bool full_recompute_ = false;
  double stage_latency_s_ = 0, stage_byte_s_ = 0, token_bytes_ = 0;
};

}  // namespace ballast
