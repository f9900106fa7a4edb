#include "core/config/config.hpp"

#include "core/config/deck_schema.hpp"

namespace ballast {

bool Config::any_set(const void* part, std::size_t bytes) const {
  // The same member of the defaults has the same distance from their beginning.
  const std::ptrdiff_t begin = static_cast<const char*>(part) - reinterpret_cast<const char*>(this);
  for (const auto& [path, setting] : from.settings) {
    const std::ptrdiff_t at = static_cast<const char*>(find_key(path)->member) -
                              reinterpret_cast<const char*>(&default_config());
    if (at >= begin && at < begin + static_cast<std::ptrdiff_t>(bytes)) return true;
  }
  return false;
}

std::string Config::effective_deck() const {
  std::string out =
      "# Effective deck: every key with its value; costs that are not stated, as comments.\n";
  if (!from.case_name.empty()) out += "# Case " + quoted(from.case_name) + "\n";
  for (const BlockSpec& block : deck_blocks()) {
    out += fmt::format("\n[{}]  # {}\n", block.name, block.meaning);
    for (const KeySpec& spec : deck_schema()) {
      if (spec.block != block.name) continue;
      const DeckValue v = spec.value(*this);
      const bool stated = !counts_when_stated(spec) || from.settings.count(spec.path()) != 0;
      out += fmt::format("{}{} = {}  # {}{}{}\n", stated ? "" : "# ", spec.key, to_text(v),
                         v == spec.default_value ? "default; " : "",
                         spec.unit.empty() ? "" : "[" + spec.unit + "] ", spec.meaning);
    }
  }
  return out;
}

}  // namespace ballast
