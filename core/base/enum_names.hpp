// Names of the values of an enum: one table an enum, beside it, which decks, messages, files and
// plans all read.  A table is a specialisation of EnumNames whose rows stand in the order that help
// and messages list them in:
//
//   template <>
//   struct EnumNames<Backend> {
//     static constexpr EnumTable<Backend, 2> table{
//         {{Backend::host, "host"}, {Backend::cuda, "cuda"}}};
//   };
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.hpp"

namespace ballast {

template <class E, std::size_t N>
using EnumTable = std::array<std::pair<E, const char*>, N>;

template <class E>
struct EnumNames;

template <class E>
concept NamedEnum = requires {
  EnumNames<E>::table;
};

template <NamedEnum E>
constexpr const char* name(E value) {
  for (const auto& [known, text] : EnumNames<E>::table)
    if (known == value) return text;
  return "?";
}

template <NamedEnum E>
std::optional<E> parse(std::string_view text) {
  for (const auto& [value, known] : EnumNames<E>::table)
    if (text == known) return value;
  return std::nullopt;
}

template <NamedEnum E>
std::vector<std::string> names_of() {
  std::vector<std::string> list;
  for (const auto& [value, text] : EnumNames<E>::table) list.emplace_back(text);
  return list;
}

template <NamedEnum E>
std::vector<E> values_of() {
  std::vector<E> list;
  for (const auto& [value, text] : EnumNames<E>::table) list.push_back(value);
  return list;
}

template <NamedEnum E>
std::ostream& operator<<(std::ostream& out, E value) {
  return out << name(value);
}

/// The value of that name; throws Error that lists the names, beginning with `what`.
template <NamedEnum E>
E parse_or_fail(std::string_view text, std::string_view what) {
  if (const std::optional<E> value = parse<E>(text)) return *value;
  fail("{} \"{}\" is unknown; allowed: {}", what, text, fmt::join(names_of<E>(), ", "));
}

}  // namespace ballast

/// Formatted as its name.
template <ballast::NamedEnum E>
struct fmt::formatter<E, char> : fmt::formatter<const char*, char> {
  template <class Context>
  auto format(E value, Context& context) const {
    return fmt::formatter<const char*, char>::format(ballast::name(value), context);
  }
};
