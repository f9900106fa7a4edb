// What a Config means to the clock: costs without a profile table, options of plan_step and
// simulate, and what each stage holds in memory; as pure functions of it.
#pragma once
#include <memory>
#include <vector>

#include "core/config/config.hpp"
#include "core/config/run_options.hpp"
#include "core/model/muon_table.hpp"
#include "core/plan/plan_step.hpp"
#include "core/predict/costs.hpp"
#include "core/predict/rate_costs.hpp"
#include "core/predict/simulate.hpp"
#include "core/predict/sparsity_tuning.hpp"

namespace ballast {

/// Block dst.  The base budget is the pattern's own where tuning states none; 0: it has none, and
/// all visible pairs or PatternWork count.
DstOptions dst_options(const Config& config);

/// Whether a sparse pattern chooses its pairs while it runs, and no budget counts them.
bool chooses_pairs(const Config& config);
/// The pattern that costs time in place of all visible pairs: of generated indexes, or what
/// attention.expected_sparsity says; null: none is known (recorded indexes lie in a file).
std::shared_ptr<const PatternWork> pattern_work(const Config& config);

/// Whose FLOPs and bytes costs price.
WorkShape work_shape(const Config& config, std::shared_ptr<const PatternWork> pattern);

/// What plans without a profile table are timed by: what block costs states, else built-in rates of
/// the backend's device.  A deck without a model and without costs takes 1 us a token.
std::shared_ptr<const Costs> stated_costs(const Config& config,
                                          std::shared_ptr<const PatternWork> pattern);

/// Muon's part of a stage.
struct StageMuon {
  std::vector<MuonShare> shares;  ///< [rank that shares the stage's optimizer]
  std::int64_t exchanged = 0;     ///< elements of a rank's matrices that others hold, at most
  double flops = 0;               ///< of a rank's orthogonalisation a step, at most
  /// To the memory of a stage, or of several as one.
  void add_to(StageMemory& memory) const;
};
/// [stage]; empty without a model or with another optimizer.
std::vector<StageMuon> stage_muon(const Config& config, const RunOptions& options);

/// What the clock needs to know of the deck beside its costs.
SimulationOptions simulation_options(const Config& config, const RunOptions& options);

/// What batching.method = "balanced" places by; `costs` must outlive the result.
std::shared_ptr<const PlacementCosts> placement_costs(const RunOptions& options,
                                                      const SimulationOptions& simulation,
                                                      const Costs& costs);

/// What plan_step needs to know of the deck, without functions.
StepOptions step_options(const Config& config, const RunOptions& options);
/// With those that ask costs; `simulation` and `costs` must outlive the result.
StepOptions step_options(const Config& config, const RunOptions& options,
                         const SimulationOptions& simulation, const Costs& costs);

/// optimizer.bucket_bytes; one bucket of all for Muon, which updates whole matrices.
std::int64_t bucket_bytes(const Config& config);

/// What is the same for all stages of a run: how its ranks share, keep and compute.
StageMemory common_memory(const Config& config, const RunOptions& options);

/// [stage] What its ranks hold and how they compute, for SimulationOptions::memory: of one
/// tensor-parallel rank.  Empty without a model.
std::vector<StageMemory> stage_memories(const Config& config, const RunOptions& options);

/// The part of the model that one tensor-parallel rank holds.
ModelShape tensor_shard(ModelShape shape, int tp);

}  // namespace ballast
