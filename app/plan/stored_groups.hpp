// Packing groups kept in the profile table: stored where they are selected (`ballast profile`,
// `ballast plan`), taken by the decks that say batching.groups_from = "profile" (HBP Section 4.1).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/config/deck_rules.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

/// What groups of this deck are selected for, beside the table's layer and dtype: model, data (hash
/// of its lengths), ranks, memory limit and ZeRO stage, attention, lengths and degrees tried. Opens
/// the deck's data.
std::map<std::string, std::string> groups_made_for(const Config& config);

/// Puts `groups` into the table of profile.table, in place of those selected for the same before;
/// others stay.  Errors: the table cannot be read or written.
void store_groups(const Config& config, const std::vector<PackGroup>& groups);

/// The groups that the deck's table holds for this deck.  Errors: none stored, or for something
/// else: both sides of the nearest selection are shown, unless profile.allow_mismatch, which takes
/// it with a note for each difference.
std::vector<PackGroup> stored_groups(const Config& config, std::vector<std::string>& notes);

/// States `groups` in the config (groups, group_ranks, group_recompute, groups_from = "deck"), so
/// that plans, executors and the effective deck have them; checks the rules again.
void use_groups(Config& config, const std::vector<PackGroup>& groups, DeckNeeds needs);
/// The same with the groups of the profile table.
void take_stored_groups(Config& config, DeckNeeds needs, std::vector<std::string>& notes);

}  // namespace ballast
