// DeckValue: one value of a deck, in the types that TOML has.
#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace ballast {

using DeckValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::int64_t>,
                               std::vector<double>, std::vector<std::string>>;

/// One function for each type, for std::visit.
template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

std::string to_text(const DeckValue& value);  ///< as TOML
/// "true or false", "an integer", "a number", "text", "a list of integers" ...
const char* type_name(const DeckValue& value);
/// `text` as a TOML string: in quotes, with backslashes and control characters escaped.
std::string quoted(const std::string& text);

}  // namespace ballast
