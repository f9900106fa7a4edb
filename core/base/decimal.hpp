// Whole numbers of a command line, as decks write them.
#pragma once
#include <string_view>

namespace ballast {

/// Whether `text` is a decimal whole number, signed or not, without leading zeros: 010 is no number
/// in TOML, and eight to C.
inline bool is_decimal(std::string_view text) {
  if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos &&
         (text.size() == 1 || text.front() != '0');
}

}  // namespace ballast
