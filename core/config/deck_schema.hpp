// The schema of decks: every block and key, with the member of Config that the key fills and when
// it is read.  Validation, help, the effective deck and HDF5 attributes all go by it.  The rows are
// in core/config/deck_rows.cpp.
#pragma once
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/base/problem.hpp"
#include "core/config/deck_value.hpp"

namespace ballast {

struct Config;

/// A key that switches others on, where it is read itself and has one of `values`, or, with
/// `except`, none of them.
struct SwitchedOn {
  const void* switch_member = nullptr;  ///< in default_config()
  std::vector<DeckValue> values;
  bool except = false;
};
/// A key is read only where any of these switches it on.
using ReadWhen = std::vector<SwitchedOn>;

/// One key of the schema.  The default value gives the type.
struct KeySpec {
  std::string block, key;
  DeckValue default_value;
  std::string unit;                  ///< "" when it has none
  std::string meaning;               ///< one line
  std::vector<std::string> allowed;  ///< for text and text lists; empty: any
  std::optional<double> minimum,
      maximum;  ///< for numbers and number lists, inclusive unless `above` or `below` is set
  bool above = false, below = false;              ///< the minimum (maximum) itself is not allowed
  const void* member = nullptr;                   ///< that it fills, in default_config()
  std::function<DeckValue(const Config&)> value;  ///< of the member
  /// Fills the member.  Throws std::logic_error for a value of another type or none of `allowed`.
  std::function<void(Config&, const DeckValue&)> fill;
  std::vector<ReadWhen> when;  ///< each of which must hold; none: always read
  std::string path() const { return block + "." + key; }
};

/// Whether a key counts by being stated, whatever its value: a stated time takes the place of the
/// device's rates.  An effective deck has such keys as comments where nothing stated them.
inline bool counts_when_stated(const KeySpec& spec) { return spec.block == "costs"; }

/// Blocks in printing order, each with one line of meaning, and all keys.
struct BlockSpec {
  std::string name, meaning;
};
std::span<const BlockSpec> deck_blocks();
std::span<const KeySpec> deck_schema();
const KeySpec* find_key(const std::string& path);
const BlockSpec* find_block(const std::string& name);
/// The names of a block's keys, in schema order.
std::vector<std::string> block_keys(const std::string& block);

/// A key that decks may not have any more.
struct RetiredKey {
  std::string path;
  std::string successor;  ///< "block.key" that took its place, or ""
  std::string remark;     ///< one line: what became of it
};
std::span<const RetiredKey> retired_keys();
const RetiredKey* find_retired(const std::string& path);

/// A Config of defaults, whose members' addresses name them.
const Config& default_config();
/// The key that fills `member` of default_config().  Throws std::logic_error where none does.
const KeySpec& key_filling(const void* member);

/// "at least 0 and below 1"; "" when any number will do.
std::string range_text(const KeySpec& spec);
/// Why `value`, which has the type of the key, is not acceptable: range, allowed values, not
/// finite.  "" when it is.
std::string value_problem(const KeySpec& spec, const DeckValue& value);
/// All blocks and keys with type, unit, default, allowed values and meaning (`ballast --help
/// deck`); with `block`, that one alone.
std::string deck_help(const std::string& block = "");

/// Overrides of the command line that change nothing, since their feature is off: one problem for
/// each, with what it needs.  Decks may state keys for their other cases, a command line has one.
std::vector<Problem> without_effect(const Config& config);

}  // namespace ballast
