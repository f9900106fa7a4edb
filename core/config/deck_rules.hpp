// Rules that join several keys: what one needs of another, what it forbids, what cannot run.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "core/base/problem.hpp"
#include "core/config/config.hpp"

namespace ballast {

/// What a command reads from a Config: a block that it needs may not be missing.
struct DeckNeeds {
  bool model = true, data = true;
  bool weights = true;  ///< the shape is completed from the folder of model.weights
  bool groups = true;   ///< of packing (hbp): taken from the profile table where
                        ///< batching.groups_from says so; false: they may still be to be selected
  bool chooses_groups = false;  ///< a search does: none need be stated or selected
  bool executes = true;         ///< ranks run it: what plans know and no executor runs is refused
};

/// All that is wrong.  Rules about a key in `faulty` stay silent: its value is not what the user
/// meant.
std::vector<Problem> problems(const Config& config, DeckNeeds needs = {},
                              const std::set<Key>& faulty = {});

/// "place: text; remedy": the place of the first of the problem's keys that the deck or the command
/// line sets, else the deck itself.
std::string placed(const Problem& problem, const Provenance& from);

}  // namespace ballast
