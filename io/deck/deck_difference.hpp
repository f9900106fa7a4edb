// What two effective decks say differently, such as that of a checkpoint and that of the run which
// continues it.
#pragma once
#include <string>
#include <vector>

namespace ballast {

struct DeckDifference {
  std::string key;           ///< block.key
  std::string before, now;   ///< values as TOML; "" where a deck has no such key
  std::string text() const;  ///< "KEY: BEFORE before, NOW now"
};

/// Keys of which two decks have other values, or only one has any, in order of their names.
/// Errors: a text that is no TOML, with `name` in the message.
std::vector<DeckDifference> deck_differences(const std::string& before, const std::string& now,
                                             const std::string& name);

}  // namespace ballast
