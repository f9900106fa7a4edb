// Overrides of the command line that change nothing: their feature is off.  Decks may state keys
// for their other cases, a command line has one.
#pragma once
#include <string>
#include <vector>

#include "core/config/deck.hpp"

namespace ballast {

/// One sentence for each key that the command line sets and a training run of this deck does not
/// read, with what it needs.
std::vector<std::string> without_effect(const Deck& deck);

}  // namespace ballast
