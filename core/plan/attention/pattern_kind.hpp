// Kinds of attention patterns, and where their indexes come from.
#pragma once
#include "core/base/enum_names.hpp"

namespace ballast {

/// Which (query, key) pairs are computed.
enum class PatternKind { dense, vertical_slash, moba, xattention };
template <>
struct EnumNames<PatternKind> {
  static constexpr EnumTable<PatternKind, 4> table{{{PatternKind::dense, "dense"},
                                                    {PatternKind::vertical_slash, "vertical_slash"},
                                                    {PatternKind::moba, "moba"},
                                                    {PatternKind::xattention, "xattention"}}};
};

/// Where indexes come from: the pattern's own rule, or made-up vertical-slash patterns.
enum class IndexOrigin { pattern, generated };
template <>
struct EnumNames<IndexOrigin> {
  static constexpr EnumTable<IndexOrigin, 2> table{
      {{IndexOrigin::pattern, "pattern"}, {IndexOrigin::generated, "generated"}}};
};

}  // namespace ballast
