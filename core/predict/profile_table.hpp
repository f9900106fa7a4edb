// Profile table: measured times of one transformer layer and of the links, as a plain value, and
// the latency model that interpolates it. Source: SparseBalance Section IV-B, Equations 8 to 10.
// The file is io/profile/profile_file.hpp; `ballast profile` measures one.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/recompute_options.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

/// Parts of a model's time, apart because they grow differently: `rest` is a layer without its
/// attention (linear in tokens), `attention` one segment's attention in a layer, `head` the
/// embedding, the final norm and the head with its loss, once a model.
enum class ProfilePart { rest, attention, head };
enum class ProfilePass { forward, backward };
const char* name(ProfilePart part);
const char* name(ProfilePass pass);

/// One measured point.
struct ProfileRow {
  ProfilePart part = ProfilePart::rest;
  std::optional<PatternKind> pattern;  ///< of attention; nothing for the others
  std::int64_t query_tokens = 0;  ///< tokens of the segment (attention) or micro-batch (rest, head)
  std::int64_t prefix_tokens = 0;  ///< stored keys before them
  std::int64_t budget = 0;         ///< key blocks a query, of the table's block_tokens, own block
                                   ///< included; 0: every visible key
  int sp = 1;                      ///< Ulysses ranks that share it
  Recompute recompute = Recompute::none;  ///< what backward includes
  ProfilePass pass = ProfilePass::forward;
  double median_s = 0;     ///< of one layer
  double spread_s = 0;     ///< distance of the quartiles
  std::int64_t bytes = 0;  ///< of rest: forward, activations kept for backward; backward, peak of
                           ///< both passes, scratch included
  bool operator==(const ProfileRow&) const = default;
};
/// Name of the pattern of attention, or "".
inline std::string pattern_text(const ProfileRow& row) {
  return row.pattern ? name(*row.pattern) : "";
}
/// "attention moba, 4096 tokens after 0, budget 8, sp 1, recompute none, forward".
std::string describe(const ProfileRow& row);

/// One level of links, such as the inner ring: a message of b bytes takes latency_s + b /
/// bytes_per_s.
struct ProfileLink {
  std::string level;  ///< inner, outer (rings), stage (pipeline)
  double latency_s = 0, bytes_per_s = 0;
  bool operator==(const ProfileLink&) const = default;
};

/// Packing groups that were selected with a table's times (core/predict/group_selection), and what
/// for, by name: model, data, ranks, memory ...
struct StoredGroups {
  std::map<std::string, std::string> made_for;
  std::vector<PackGroup> groups;
  bool operator==(const StoredGroups&) const = default;
};

struct ProfileTable {
  /// What the figures hold for, by name: hardware, kernels (hash of their sources), layer (shape),
  /// dtype ...
  std::map<std::string, std::string> identity;
  std::int64_t block_tokens = 64;  ///< tokens of a key block that budgets count
  std::vector<ProfileRow> rows;
  std::vector<ProfileLink> links;
  std::vector<StoredGroups> groups;

  /// The link of a level; null: not measured.
  const ProfileLink* link(std::string_view level) const;
  bool operator==(const ProfileTable&) const = default;
};

/// Checks a table and repairs what can be; each repair is one sentence in `notes`.  Rows of one
/// series (part, pattern, sp, recompute, pass) form a grid of lengths, prefixes and budgets.
///   * A row without a positive finite time is a hole, and so is a point of the grid without a row.
///   A hole between two measured budgets
///     (of the same length and prefix) or lengths is left to interpolation.  A length whose
///     smallest or largest needed budget is missing, a series without its other pass, and two rows
///     for one point are refused; budgets that cover all keys count as one.
///   * A budget that takes longer than all keys of its length and prefix by more than `limit` gets
///   their time: over few keys choosing costs more than it saves.
///   * Times that fall where tokens, prefix or budget grow are replaced by the geometric mean of
///   the two monotone envelopes; where that moves a time by more than `limit` (relative) and by
///   more than 20 us, the table is refused.
/// Errors name the rows and the remedy.
ProfileTable checked(ProfileTable table, double limit, std::vector<std::string>& notes);

}  // namespace ballast
