// Times and memory of packs from the deck: its profile table, or the times stated in [costs].
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/predict/group_selection.hpp"

namespace ballast {

/// From profile.table where the deck names one (memory from its rows), else from the stated costs
/// with the memory that `check` states.  The ring's ranks (mesh.cp) share every pack on top of its
/// own.  Nothing when the deck states neither.  Notes of the table go to `notes`.
std::optional<PackCosts> pack_costs(const Config& config, std::vector<std::string>& notes);

}  // namespace ballast
