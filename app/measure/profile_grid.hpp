// What `ballast profile` measures: the points of the table, chosen so that predictions interpolate
// well between them, and how long that takes.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/config/config.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// Axes of the table, from block profile; `gpu` chooses the defaults of lists that the deck leaves
/// empty.
struct ProfileBins {
  ProfileBins(const Config& config, bool gpu);
  PatternKind pattern;  ///< whose budgets are measured beside dense attention; dense: none are
  std::int64_t block_tokens = 64;
  std::vector<std::int64_t> lengths, prefixes, budgets;  ///< prefixes begin with 0
  std::vector<Recompute> recompute;
};

/// One measurement, forward and backward.
struct ProfilePoint {
  ProfilePart part = ProfilePart::rest;
  std::optional<PatternKind> pattern;  ///< of attention
  std::int64_t query_tokens = 0, prefix_tokens = 0, budget = 0;
  Recompute recompute = Recompute::none;  ///< of rest; attention and head do not depend on it, or
                                          ///< as recomputed() says
  bool operator==(const ProfilePoint&) const = default;
};

/// Per length: rest for every recompute mode, the head, attention dense and at the budgets that
/// leave something out, up to the first that does not.  After a prefix every other budget is left
/// to interpolation: what a query with a budget costs hardly depends on the keys before it.
std::vector<ProfilePoint> profile_points(const ProfileBins& bins);

/// Seconds of one run of a pass.
struct PilotTimes {
  std::int64_t tokens = 0;  ///< of the pilot
  double rest_s = 0, attention_s = 0,
         head_s = 0;  ///< forward and backward at that length, attention dense
};
/// What each pass of every point costs once (mean of both passes), scaled from the pilot: rest and
/// head with the tokens, attention with the pairs.
std::vector<double> estimated_run_seconds(const std::vector<ProfilePoint>& points,
                                          const PilotTimes& pilot, std::int64_t block_tokens);

/// How often passes run (LayerProfiler): batches of at least `batch_s`, as many as fit into
/// `pass_s`, between `least` and `most`.  Before them the device works for `heat_s`, at most half
/// of `pass_s`: a GPU at its power limit lowers its clock within that time, as it does in training.
struct RepeatRule {
  double batch_s = 0.004, pass_s = 0.1, heat_s = 0;
  std::int64_t warmup = 2, least = 3, most = 9;
  double most_runs = 1000;                   ///< of a batch, and of those that heat
  std::int64_t warmups(double run_s) const;  ///< untimed runs: one, and more of short work
                                             ///< (up to `warmup`, or until the device is hot)
  std::int64_t runs(double run_s) const;     ///< in one batch
  std::int64_t batches(double run_s) const;  ///< timed
  double seconds(double run_s) const;        ///< of a pass, warm-up included
};

}  // namespace ballast
