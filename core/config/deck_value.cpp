#include "core/config/deck_value.hpp"

#include <fmt/format.h>

#include <cmath>

namespace ballast {
namespace {

/// TOML float: shortest text that reads back as the same number.
std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

}  // namespace

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\r':
        out += "\\r";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
          out += fmt::format("\\u{:04X}", static_cast<unsigned char>(c));
        else
          out += c;
    }
  }
  return out + '"';
}

std::string to_text(const DeckValue& value) {
  const auto list = [](const auto& values, auto&& one) {
    std::string text;
    for (const auto& v : values) text += (text.empty() ? "" : ", ") + one(v);
    return "[" + text + "]";
  };
  return std::visit(Overloaded{
                        [](bool v) -> std::string { return v ? "true" : "false"; },
                        [](std::int64_t v) { return fmt::to_string(v); },
                        [](double v) { return real_text(v); },
                        [](const std::string& v) { return quoted(v); },
                        [&](const std::vector<std::int64_t>& v) {
                          return list(v, [](std::int64_t x) { return fmt::to_string(x); });
                        },
                        [&](const std::vector<double>& v) { return list(v, real_text); },
                        [&](const std::vector<std::string>& v) { return list(v, quoted); },
                    },
                    value);
}

const char* type_name(const DeckValue& value) {
  static constexpr const char* names[] = {
      "true or false",      "an integer",        "a number",      "text",
      "a list of integers", "a list of numbers", "a list of text"};
  return names[value.index()];
}

}  // namespace ballast
