// Times and memory of packs from the deck: its profile table, or the times stated in [costs].
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/config/deck.hpp"
#include "core/predict/group_selection.hpp"

namespace ballast {

/// From profile.table where the deck names one (series "none" and, where measured, "full"; memory
/// from its rows), else from costs.forward_token_s, forward_pair_s, backward_over_forward and
/// exchange_token_s (whole model) with the memory estimate of `check`. The ring's ranks (mesh.cp)
/// share every pack on top of its own.  Nothing when the deck states neither.  Notes of the table
/// go to `notes`.
std::optional<PackCosts> pack_costs(const Deck& deck, std::vector<std::string>& notes);

/// Layers that block recompute recomputes in every micro-batch.
int recomputed_layers(const Deck& deck);

}  // namespace ballast
