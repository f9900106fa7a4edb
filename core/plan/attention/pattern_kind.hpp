// Kinds of attention patterns and their names in decks, traces and tables: the one list.
#pragma once
#include <array>
#include <string_view>

namespace ballast {

enum class PatternKind { dense, vertical_slash, moba, xattention };

struct PatternName {
  PatternKind kind;
  const char* name;
};
inline constexpr std::array<PatternName, 4> kPatternNames{
    {{PatternKind::dense, "dense"},
     {PatternKind::vertical_slash, "vertical_slash"},
     {PatternKind::moba, "moba"},
     {PatternKind::xattention, "xattention"}}};

const char* name(PatternKind kind);
/// Error: an unknown name.
PatternKind pattern_kind(std::string_view name);

}  // namespace ballast
