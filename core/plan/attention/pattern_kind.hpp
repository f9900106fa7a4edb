// Kinds of attention patterns, and where their indexes come from.
#pragma once
#include "core/base/enum_names.hpp"

namespace ballast {

/// Which (query, key) pairs are computed.
enum class PatternKind { dense, vertical_slash, moba, xattention, by_head, flexprefill };
template <>
struct EnumNames<PatternKind> {
  static constexpr EnumTable<PatternKind, 6> table{{{PatternKind::dense, "dense"},
                                                    {PatternKind::vertical_slash, "vertical_slash"},
                                                    {PatternKind::moba, "moba"},
                                                    {PatternKind::xattention, "xattention"},
                                                    {PatternKind::by_head, "by_head"},
                                                    {PatternKind::flexprefill, "flexprefill"}}};
};

/// Which queries a vertical-slash index is chosen by: a segment's last ones, for all of it
/// (MTraining Algorithm 1, which looks at the end to choose for the beginning), or for each stretch
/// of queries those just before it.
enum class IndexSelection { last, causal };
template <>
struct EnumNames<IndexSelection> {
  static constexpr EnumTable<IndexSelection, 2> table{
      {{IndexSelection::last, "last"}, {IndexSelection::causal, "causal"}}};
};

/// Queries that coverage is told of.  vertical_slash: a segment's last ones, or as many sampled
/// over all of it; moba: all, or the first 16 of every 64.
enum class CoverageRows { last, sampled };
template <>
struct EnumNames<CoverageRows> {
  static constexpr EnumTable<CoverageRows, 2> table{
      {{CoverageRows::last, "last"}, {CoverageRows::sampled, "sampled"}}};
};

/// Where indexes come from: the pattern's own rule, made-up vertical-slash patterns, or choices
/// that an earlier run stored.
enum class IndexOrigin { pattern, generated, recorded };
template <>
struct EnumNames<IndexOrigin> {
  static constexpr EnumTable<IndexOrigin, 3> table{{{IndexOrigin::pattern, "pattern"},
                                                    {IndexOrigin::generated, "generated"},
                                                    {IndexOrigin::recorded, "recorded"}}};
};

}  // namespace ballast
