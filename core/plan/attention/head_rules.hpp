// Patterns by head: what each (layer, head) computes, from a table that a search on a trained
// model writes (`ballast bench heads`).  Idea: MInference (Jiang et al., 2024), which gives each
// head the sparse pattern that holds most of its attention at equal cost.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/plan/attention/pattern_selection.hpp"
#include "core/plan/attention/vertical_slash.hpp"

namespace ballast {

/// What one head computes: every pair; the segment's first keys and a window (A-shape); columns
/// and slashes; for each block of 64 queries some blocks of 64 keys.
enum class HeadPattern { dense, a_shape, vertical_slash, block_sparse };
template <>
struct EnumNames<HeadPattern> {
  static constexpr EnumTable<HeadPattern, 4> table{{{HeadPattern::dense, "dense"},
                                                    {HeadPattern::a_shape, "a_shape"},
                                                    {HeadPattern::vertical_slash, "vertical_slash"},
                                                    {HeadPattern::block_sparse, "block_sparse"}}};
};

/// A head's pattern with its parameters; those of other patterns are 0.  The segment's first block
/// of 64 keys and the diagonal are always computed.
struct HeadRule {
  HeadPattern pattern = HeadPattern::dense;
  std::int64_t sink = 0;     ///< a_shape: keys at the segment's start, a multiple of 64
  std::int64_t window = 0;   ///< a_shape: keys up to the query's own block, a multiple of 64
  std::int64_t columns = 0;  ///< vertical_slash: the heaviest so many
  std::int64_t slashes = 0;  ///< vertical_slash: the heaviest so many
  std::int64_t blocks = 0;   ///< block_sparse: the heaviest so many of a block of queries
  bool operator==(const HeadRule&) const = default;
};
/// "a_shape sink 64 window 256".
std::string to_text(const HeadRule& rule);
/// Empty, or what is wrong: parameters that are none, or that the pattern does not have.
std::string problems(const HeadRule& rule);

class HeadTable {
 public:
  /// Every head of every layer alike.
  HeadTable(int layers, int heads, const HeadRule& rule = {});
  int layers() const { return layers_; }
  int heads() const { return heads_; }
  const HeadRule& at(int layer, int head) const { return rules_[place(layer, head)]; }
  HeadRule& at(int layer, int head) { return rules_[place(layer, head)]; }
  bool operator==(const HeadTable&) const = default;

 private:
  /// Error: a layer or head that the table does not have.
  std::size_t place(int layer, int head) const;
  int layers_, heads_;
  std::vector<HeadRule> rules_;
};

/// Slashes and columns of a head over a segment of `tokens` keys; none for block_sparse.  `mass`,
/// of vertical_slash alone, lists all columns that have any.
VerticalSlash choose_by_rule(const HeadRule& rule, const HeadMass* mass, std::int64_t tokens);

/// Square root of the Jensen-Shannon divergence (natural logarithm) of two distributions, each
/// given as weights >= 0 over the same blocks; 0 where one has no weight.  Source: FlexPrefill
/// (Lai et al., 2025), which compares a pooled estimate of a head's attention with what its last
/// queries attend to.
double divergence(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace ballast
