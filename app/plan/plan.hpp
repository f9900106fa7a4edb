// Parts of `ballast plan`: each reads its blocks of a deck and returns what it found, or nothing
// where the deck says nothing of it.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.hpp"

namespace ballast {

/// One table of the planner, and the same figures for the twin.
struct PlanPart {
  std::string title;
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  std::string note;               ///< the formulas, printed once under the table
  nlohmann::ordered_json values;  ///< an object; keys are the metrics' names
};

/// Time of one call of ring attention from the component times in [costs] (MTraining Table 4).
std::optional<PlanPart> plan_ring_times(const Config& config);

/// Balance of a generated or recorded pattern (attention.index) over the ranks and steps of the
/// deck's ring (MTraining Table 5).
std::optional<PlanPart> plan_balance(const Config& config);

/// Pipeline schedule of the deck's first global batch over mesh.pp stages, from stated costs
/// (ChunkFlow Sections 3 to 5).
std::optional<PlanPart> plan_pipeline(const Config& config);

/// The fastest chunk size and K whose fullest rank fits a memory limit (ChunkFlow Section 5).
std::optional<PlanPart> plan_search(const Config& config);

/// Sparsity-aware batching and dynamic sparsity tuning (blocks dst, sab) over run.steps global
/// batches (SparseBalance Table I).
std::optional<PlanPart> plan_sparsebalance(const Config& config);

/// Packing groups for the deck's data (batching.select_lengths) from its profile table or stated
/// costs (HBP Section 4.1).  Stored in the profile table where batching.groups_from = "profile".
std::optional<PlanPart> plan_groups(const Config& config);

}  // namespace ballast
