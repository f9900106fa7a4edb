#include "core/base/shell_word.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/utf8.hpp"

namespace ballast {
namespace {

bool is_control(char c) {
  const auto u = static_cast<unsigned char>(c);
  return u < 0x20 || u == 0x7f;
}

/// Letters, digits and what no shell looks at.
bool is_bare(char c) {
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  return letter || std::string_view("_@%+=:,./-").find(c) != std::string_view::npos;
}

/// Bytes of the printable character at `text`'s begin; 0: there is none.
std::size_t printable_bytes(std::string_view text) {
  if (is_control(text.front())) return 0;
  for (std::size_t n = 1; n <= std::min<std::size_t>(4, text.size()); ++n)
    if (is_utf8(text.substr(0, n))) return n;
  return 0;
}

}  // namespace

std::string shell_word(std::string_view text) {
  if (!text.empty() && std::all_of(text.begin(), text.end(), is_bare)) return std::string(text);
  std::string word, quoted, bytes;
  const auto close = [&] {  // one of them is empty
    if (!quoted.empty()) word += "'" + quoted + "'";
    if (!bytes.empty()) word += "\"$(printf '" + bytes + "')\"";
    quoted.clear(), bytes.clear();
  };
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t n = printable_bytes(text.substr(i));
    if (n == 0 && text[i] == '\n') {
      close();
      word += "\"${IFS#??}\"";
    } else if (n == 0) {
      if (!quoted.empty()) close();
      bytes += fmt::format("\\{:03o}", static_cast<unsigned char>(text[i]));
    } else {
      if (!bytes.empty()) close();
      quoted += text[i] == '\'' ? "'\\''" : std::string(text.substr(i, n));
    }
    i += std::max<std::size_t>(1, n);
  }
  close();
  return word.empty() ? "''" : word;
}

std::string comment_text(std::string text) {
  const bool utf8 = is_utf8(text);
  for (char& c : text)
    if (is_control(c) || (!utf8 && static_cast<unsigned char>(c) >= 0x80)) c = '?';
  return text;
}

}  // namespace ballast
