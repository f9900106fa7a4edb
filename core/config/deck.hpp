// Deck: the typed values of one input deck, and the one schema that validation, help, the effective
// deck and HDF5 attributes read.  Reading files is io/deck/deck_reader.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/base/error.hpp"

namespace ballast {

struct ModelShape;

using DeckValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                               std::vector<double>, std::vector<std::string>>;

/// One key of the schema.  The default value gives the type.
struct KeySpec {
  std::string block, key;
  DeckValue default_value;
  std::string unit;                  ///< "" when it has none
  std::string meaning;               ///< one line
  std::vector<std::string> allowed;  ///< for text and text lists; empty: any
  std::optional<double> minimum,
      maximum;  ///< for numbers and number lists, inclusive unless `above` or `below` is set
  bool above = false, below = false;  ///< the minimum (maximum) itself is not allowed
  std::string path() const { return block + "." + key; }
};

/// Blocks in printing order, each with one line of meaning, and all keys.
struct BlockSpec {
  std::string name, meaning;
};
std::span<const BlockSpec> deck_blocks();
std::span<const KeySpec> deck_schema();
const KeySpec* find_key(const std::string& path);
const BlockSpec* find_block(const std::string& name);
std::vector<std::string> block_keys(
    const std::string& block);  ///< names of a block's keys, in schema order
/// Nearest known name by edit distance (a swap of neighbours counts 1, case is ignored), or "" when
/// nothing is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);
std::string to_text(const DeckValue& value);  ///< as TOML
/// "true or false", "an integer", "a number", "text", "a list of integers" ...
const char* type_name(const DeckValue& value);
/// "at least 0 and below 1"; "" when any number will do.
std::string range_text(const KeySpec& spec);
/// Why `value`, which has the type of the key, is not acceptable: range, allowed values, not
/// finite.  "" when it is.
std::string value_problem(const KeySpec& spec, const DeckValue& value);
/// All blocks and keys with type, unit, default, allowed values and meaning (`ballast --help
/// deck`); with `block`, that one alone.
std::string deck_help(const std::string& block = "");

/// Place of a value, for messages: "deck.toml:12" or "command line: mesh.dp=3".
struct DeckEntry {
  DeckValue value;
  std::string place;
};

class Deck {
 public:
  std::string file;       ///< path as given, for messages
  std::string case_name;  ///< chosen case, or ""

  /// Value of "block.key": set in the deck, or the schema's default.  Throws std::logic_error for a
  /// key or type that the schema does not have (a programming error).
  template <class T>
  const T& get(const std::string& path) const {
    const T* held = std::get_if<T>(&value(path));
    if (held == nullptr)
      throw std::logic_error("deck key " + path + " is " + type_name(value(path)));
    return *held;
  }
  std::int64_t integer(const std::string& path) const { return get<std::int64_t>(path); }
  double real(const std::string& path) const { return get<double>(path); }
  bool boolean(const std::string& path) const { return get<bool>(path); }
  const std::string& text(const std::string& path) const { return get<std::string>(path); }
  const DeckValue& value(const std::string& path) const;
  bool is_set(const std::string& path) const { return entries_.count(path) != 0; }
  /// Whether any key of the block is set.
  bool block_set(const std::string& block) const;
  /// Where the value stands, or "default".
  std::string place(const std::string& path) const;
  /// Throws std::logic_error like value().
  void set(const std::string& path, DeckValue value, std::string place);
  /// Fills the shape keys of [model] that the deck leaves out from a known model.preset, so that
  /// values and effective deck hold the whole shape.
  void apply_preset();
  /// Forgets the keys of the model's shape (layers to rms_eps), for a preset that comes after them;
  /// those that stretch the context stay.
  void drop_shape();
  /// The same from `shape`, read from the folder of model.weights.  Returns one problem for each
  /// key to which the deck, or its preset, gives another value; the keys that stretch the context
  /// (rope_theta, original_context, yarn_factor, llama3_*) may differ.
  std::vector<std::string> apply_weights(const ModelShape& shape);
  /// Whether every key of the model's shape has a value, as in an effective deck or from a preset.
  bool states_shape() const;
  /// The whole effective deck as TOML: every key with its value, unit and meaning; defaults are
  /// commented as such.  Reading it again gives the same values.
  std::string effective_toml() const;

 private:
  std::map<std::string, DeckEntry> entries_;
};

/// What a command reads from a deck: a block that it needs may not be missing.
struct DeckNeeds {
  bool model = true, data = true;
  bool weights = true;  ///< the shape is completed from the folder of model.weights
  bool groups = true;   ///< of packing (hbp): taken from the profile table where
                        ///< batching.groups_from says so; false: they may still be to be selected
};

/// Cross-key rules (needs one key, forbids another, a combination that cannot run): one message a
/// problem, each with the place.  Rules about a key in `faulty` ("block.key") stay silent: its
/// value is not what the user meant.
std::vector<std::string> deck_problems(const Deck& deck, DeckNeeds needs = {},
                                       const std::set<std::string>& faulty = {});

}  // namespace ballast
