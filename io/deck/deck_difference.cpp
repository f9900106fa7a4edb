#include "io/deck/deck_difference.hpp"

#include <toml++/toml.h>

#include <map>
#include <sstream>

#include "core/base/error.hpp"
#include "core/config/deck_schema.hpp"

namespace ballast {
namespace {

std::string as_toml(const std::string& value) {
  std::ostringstream out;
  toml::parse("x = " + value)["x"].visit([&](const auto& typed) { out << typed; });
  return out.str();
}

/// Values of a deck under "block.key", as TOML.
std::map<std::string, std::string> values_of(const std::string& text, const std::string& name) {
  std::map<std::string, std::string> values;
  try {
    for (const auto& [block, node] : toml::parse(text)) {
      const toml::table* table = node.as_table();
      if (table == nullptr) continue;
      for (const auto& [key, value] : *table) {
        std::ostringstream out;
        value.visit([&](const auto& typed) { out << typed; });
        values[std::string(block.str()) + "." + std::string(key.str())] = out.str();
      }
    }
    for (const KeySpec& spec : deck_schema())  // comments of an effective deck
      if (counts_when_stated(spec) && !values.empty() && values.count(spec.path()) == 0)
        values[spec.path()] = as_toml(to_text(spec.default_value));
  } catch (const toml::parse_error& error) {
    fail("{}: its deck cannot be read: {}", name, error.description());
  }
  return values;
}

}  // namespace

std::string DeckDifference::text() const {
  return fmt::format("{}: {} before, {} now", key, before, now);
}

std::vector<DeckDifference> deck_differences(const std::string& before, const std::string& now,
                                             const std::string& name) {
  const auto old = values_of(before, name), fresh = values_of(now, "the effective deck");
  std::vector<DeckDifference> list;
  std::map<std::string, std::string> all = old;
  all.insert(fresh.begin(), fresh.end());
  for (const auto& [key, value] : all) {
    const auto a = old.find(key), b = fresh.find(key);
    DeckDifference difference{key, a == old.end() ? "" : a->second,
                              b == fresh.end() ? "" : b->second};
    if (difference.before != difference.now) list.push_back(std::move(difference));
  }
  return list;
}

}  // namespace ballast
