// Deck: the typed values of one input deck, and the one schema that validation, help, the effective deck and HDF5
// attributes read.  Reading files is io/deck_reader.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/error.hpp"

namespace ballast {

using DeckValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>, std::vector<double>, std::vector<std::string>>;

/// One key of the schema.  The default value gives the type.
struct KeySpec {
  std::string block, key;
  DeckValue default_value;
  std::string unit;                  ///< "" when it has none
  std::string meaning;               ///< one line
  std::vector<std::string> allowed;  ///< for text and text lists; empty: any
  std::optional<double> minimum, maximum;  ///< for numbers and number lists, inclusive
  std::string path() const { return block + "." + key; }
};

/// Blocks in printing order, each with one line of meaning, and all keys.
struct BlockSpec { std::string name, meaning; };
std::span<const BlockSpec> deck_blocks();
std::span<const KeySpec> deck_schema();
const KeySpec* find_key(const std::string& path);
/// Nearest known name by edit distance, or "" when nothing is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);
std::string to_text(const DeckValue& value);  ///< as TOML
const char* type_name(const DeckValue& value);

/// Place of a value, for messages: "deck.toml:12" or "command line: mesh.dp=3".
struct DeckEntry {
  DeckValue value;
  std::string place;
};

class Deck {
 public:
  std::string file;      ///< path as given, for messages
  std::string case_name; ///< chosen case, or ""

  /// Value of "block.key": set in the deck, or the schema's default.  Throws std::logic_error for a key or type that
  /// the schema does not have (a programming error).
  template <class T> const T& get(const std::string& path) const { return std::get<T>(value(path)); }
  std::int64_t integer(const std::string& path) const { return get<std::int64_t>(path); }
  double real(const std::string& path) const { return get<double>(path); }
  bool boolean(const std::string& path) const { return get<bool>(path); }
  const std::string& text(const std::string& path) const { return get<std::string>(path); }
  const DeckValue& value(const std::string& path) const;
  bool is_set(const std::string& path) const { return entries_.count(path) != 0; }
  /// Where the value stands, or "default".
  std::string place(const std::string& path) const;
  void set(const std::string& path, DeckValue value, std::string place);
  /// The whole effective deck as TOML: every key with its value, unit and meaning; defaults are commented as such.
  std::string effective_toml() const;

 private:
  std::map<std::string, DeckEntry> entries_;
};

/// Cross-key rules (needs one key, forbids another, a combination that cannot run): one message a problem, each with the place.
std::vector<std::string> deck_problems(const Deck& deck);

}  // namespace ballast
