// How a row of the deck schema is written: a member of Config in, a KeySpec out, which reads and
// fills the member in the types of decks.
#pragma once
#include <concepts>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/config/config.hpp"
#include "core/config/deck_schema.hpp"

namespace ballast::deck_row {

inline constexpr double kDegree = 1 << 20;    ///< ranks of one mesh dimension
inline constexpr double kTokens = 1ll << 40;  ///< tokens, steps, samples
inline constexpr double kWidth = 1 << 24;     ///< extent of a model dimension

/// Bounds of a number.
struct Range {
  std::optional<double> minimum, maximum;
  bool above = false, below = false;
};
inline constexpr Range any{};
inline Range at_least(double minimum) { return {minimum, std::nullopt, false, false}; }
inline Range above(double minimum) { return {minimum, std::nullopt, true, false}; }
inline Range between(double minimum, double maximum) { return {minimum, maximum, false, false}; }
/// [minimum, maximum)
inline Range up_to(double minimum, double maximum) { return {minimum, maximum, false, true}; }

/// (0, 1]
inline Range share() { return {0.0, 1.0, true, false}; }

template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

/// A member's type in decks: whole numbers are 64 bit, choices are text.
template <class T>
auto to_deck(const T& value) {
  if constexpr (IsVector<T>::value) {
    std::vector<decltype(to_deck(value.front()))> list;
    for (const auto& one : value) list.push_back(to_deck(one));
    return list;
  } else if constexpr (NamedEnum<T>) {
    return std::string(name(value));
  } else if constexpr (std::integral<T> && !std::same_as<T, bool>) {
    return static_cast<std::int64_t>(value);
  } else {
    return value;
  }
}

template <class T, class Held>
void from_deck(const Held& held, T& value) {
  if constexpr (IsVector<T>::value) {
    value.resize(held.size());
    for (std::size_t i = 0; i < held.size(); ++i) from_deck(held[i], value[i]);
  } else if constexpr (NamedEnum<T>) {
    const std::optional<T> known = parse<T>(held);
    if (!known) throw std::logic_error("\"" + held + "\" is none of the values of a choice");
    value = *known;
  } else {
    value = static_cast<T>(held);
  }
}

/// The values of a choice; nothing for other types.
template <class T>
std::vector<std::string> choices() {
  if constexpr (IsVector<T>::value)
    return choices<typename T::value_type>();
  else if constexpr (NamedEnum<T>)
    return names_of<T>();
  else
    return {};
}

/// A member of Config that says when other keys are read.
template <class T>
struct Switch {
  const T* member;  ///< in default_config()
  /// It has one of `values`, or, without them, not its default.
  template <class... Values>
  SwitchedOn is(Values... values) const {
    if constexpr (sizeof...(values) == 0) return is_not(*member);
    return {member, {DeckValue(to_deck(static_cast<T>(values)))...}};
  }
  template <class... Values>
  SwitchedOn is_not(Values... values) const {
    return {member, {DeckValue(to_deck(static_cast<T>(values)))...}, true};
  }
};
template <class B, class T>
Switch<T> on(B Config::*block, T B::*member) {
  return {&(default_config().*block.*member)};
}

/// The row just added, for what few rows have.
struct Row {
  KeySpec& spec;
  /// The only values that a text may have.
  Row allow(std::vector<std::string> values) const {
    spec.allowed = std::move(values);
    return *this;
  }
  /// Read only where the switch is read and has one of `values`, or, without them, not its default;
  /// called again: where that holds too.
  template <class T, class... Values>
  Row when(Switch<T> by, Values... values) const {
    return when_any({by.is(values...)});
  }
  Row when_any(ReadWhen switches) const {
    spec.when.push_back(std::move(switches));
    return *this;
  }
};

/// A block of the deck, or the part of one that `of` finds in a Config, whose keys begin with
/// `prefix`.
template <class Block>
struct Part {
  std::vector<KeySpec>& list;
  std::string block;
  std::function<Block&(Config&)> of;
  std::string prefix;

  template <class T>
  Row key(const char* name, T Block::*member, const char* unit, Range range,
          const char* meaning) const {
    const auto at = [of = of, member](const Config& config) -> const T& {
      return of(const_cast<Config&>(config)).*member;  // which only `fill` changes
    };
    KeySpec& spec = list.emplace_back();
    spec.block = block;
    spec.key = prefix + name;
    spec.default_value = to_deck(at(default_config()));
    spec.unit = unit;
    spec.meaning = meaning;
    spec.allowed = choices<T>();
    spec.minimum = range.minimum;
    spec.maximum = range.maximum;
    spec.above = range.above;
    spec.below = range.below;
    spec.member = &at(default_config());
    spec.value = [at](const Config& config) -> DeckValue { return to_deck(at(config)); };
    spec.fill = [of = of, member, path = spec.path()](Config& config, const DeckValue& value) {
      const auto* held = std::get_if<decltype(to_deck(std::declval<const T&>()))>(&value);
      if (held == nullptr) throw std::logic_error("deck key " + path + " is " + type_name(value));
      from_deck(*held, of(config).*member);
    };
    return {spec};
  }
  template <class T>
  Row key(const char* name, T Block::*member, const char* meaning) const {
    return key(name, member, "", any, meaning);
  }
};

class Schema {
 public:
  template <class Block>
  Part<Block> block(const char* name, Block Config::*block) {
    return {list, name, [block](Config& config) -> Block& { return config.*block; }, ""};
  }
  template <class Block>
  Part<Block> part(const char* name, std::function<Block&(Config&)> of, const char* prefix) {
    return {list, name, std::move(of), prefix};
  }
  std::vector<KeySpec> list;
};

}  // namespace ballast::deck_row
