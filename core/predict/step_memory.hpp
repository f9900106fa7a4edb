// Peak bytes of a plan's stages: memory_replay over the lanes of one step, or of a whole run.
#pragma once
#include <cstdint>
#include <vector>

#include "core/plan/step_plan.hpp"
#include "core/predict/memory_replay.hpp"
#include "core/predict/micro_batch_times.hpp"

namespace ballast {

/// [stage] The largest peaks of all lanes, whose ranks come to hold the largest pool of any of them
/// over a run's steps; lanes alike are replayed once.  Empty without SimulationOptions::memory.
std::vector<MemoryEstimate> step_memory(const StepPlan& plan, const SimulationOptions& options);

/// replay_run of a rank with the most tokens of its Ulysses group and, where these are uneven, of
/// one with the fewest.  Either may hold more: a buffer serves for what is as large or smaller, and
/// blocks of the one are larger than a whole sequence, of the other smaller.
MemoryEstimate replay_ranks(const StageMemory& stage, std::vector<StageWork> steps,
                            std::vector<ForwardPasses> between = {});

/// [stage] The largest peaks of all lanes over all steps of a run, from its first one on (what
/// train measures, whose first steps hold pools that have not grown yet), options.between among
/// them.
std::vector<MemoryEstimate> run_memory(const std::vector<StepPlan>& steps,
                                       const SimulationOptions& options);

/// A GPU keeps the patterns of the sample whose drift is measured, computed by the plan `drift`,
/// from one measurement to the next: counts them in every stage.
void count_kept_indexes(const StepPlan& drift, std::vector<StageMemory>& stages);

}  // namespace ballast
