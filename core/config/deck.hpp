// Deck: the values that a deck and the command line set, by key, and where; what parsing fills and
// a Config is made from.  Reading files is io/deck/deck_reader.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/nearest_name.hpp"
#include "core/config/config.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/deck_value.hpp"

namespace ballast {

struct ModelShape;

/// Place of a value, for messages: "deck.toml:12" or "command line: mesh.dp=3".
struct DeckEntry {
  DeckValue value;
  std::string place;
  Origin origin = Origin::file;
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
  const std::string& text(const std::string& path) const { return get<std::string>(path); }
  const DeckValue& value(const std::string& path) const;
  bool is_set(const std::string& path) const { return entries_.count(path) != 0; }
  /// Throws std::logic_error like value().
  void set(const std::string& path, DeckValue value, std::string place,
           Origin origin = Origin::file);
  Origin origin(const std::string& path) const;
  /// The deck as a Config: set values, the preset's shape, defaults.  Throws std::logic_error for a
  /// value that value_problem() refuses.
  Config config() const;
  /// Fills the shape keys of [model] that the deck leaves out from a known model.preset, so that
  /// values and effective deck hold the whole shape.
  void apply_preset();
  /// Forgets the keys of the model's shape (layers to rms_eps), for a preset that comes after them;
  /// those that stretch the context stay.
  void drop_shape();
  /// The same from `shape`, read from the folder of model.weights.  Returns one problem for each
  /// key to which the deck, or its preset, gives another value; the keys that stretch the context
  /// (rope_theta, original_context, yarn_factor, llama3_*) may differ.  A folder that the command
  /// line names replaces a preset of the deck.
  std::vector<Problem> apply_weights(const ModelShape& shape);
  /// Whether every key of the model's shape has a value, as in an effective deck or from a preset.
  bool states_shape() const;

 private:
  std::map<std::string, DeckEntry> entries_;
};

}  // namespace ballast
