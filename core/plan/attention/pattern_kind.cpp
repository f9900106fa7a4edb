#include "core/plan/attention/pattern_kind.hpp"

#include <string>

#include "core/base/error.hpp"

namespace ballast {

const char* name(PatternKind kind) {
  for (const PatternName& row : kPatternNames)
    if (row.kind == kind) return row.name;
  return "?";
}

PatternKind pattern_kind(std::string_view name) {
  std::string allowed;
  for (const PatternName& row : kPatternNames) {
    if (row.name == name) return row.kind;
    allowed += (allowed.empty() ? "" : ", ") + std::string(row.name);
  }
  fail("attention pattern \"{}\" is unknown; allowed: {}", name, allowed);
}

}  // namespace ballast
