// Problem: what is wrong with options, as a value: which deck keys are at fault, why, and what to
// do about it.
#pragma once
#include <span>
#include <string>
#include <vector>

namespace ballast {

/// A key of the deck, "block.key".
struct Key {
  std::string path;
  Key(const char* text) : path(text) {}
  Key(std::string text) : path(std::move(text)) {}
  auto operator<=>(const Key&) const = default;
};

struct Problem {
  std::vector<Key> keys;    ///< at fault, the first the most
  std::string text;         ///< one sentence
  std::string remedy = {};  ///< what to do about it, or ""

  /// Text and remedy, "text; remedy".
  std::string message() const { return remedy.empty() ? text : text + "; " + remedy; }
};

/// All messages, `between` them.
inline std::string messages(std::span<const Problem> problems, const std::string& between = "\n") {
  std::string all;
  for (const Problem& problem : problems) all += (all.empty() ? "" : between) + problem.message();
  return all;
}

}  // namespace ballast
