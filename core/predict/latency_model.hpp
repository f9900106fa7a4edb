// Latencies of layers and micro-batches, interpolated from a profile table.  Source: SparseBalance
// Equations 8 and 9.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/model/recompute_options.hpp"
#include "core/plan/attention/attention_options.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// Seconds of one layer (or head).
struct LayerTime {
  double forward_s = 0, backward_s = 0;
  double total_s() const { return forward_s + backward_s; }
};

/// Mean keys that a query of `query_tokens` tokens after `prefix_tokens` stored ones sees with
/// `budget` key blocks; budget 0: all.
double mean_keys(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                 std::int64_t block_tokens);

/// Monotone power law through points: log y linear in log x between them and, with the slope of the
/// two nearest points, beyond them: kept within [0, 1] below (a token costs no less in a shorter
/// call) and [1, 2] above (what launches hide in small calls grows with the work in large ones).
/// One point: slope 1.
class PowerCurve {
 public:
  PowerCurve() = default;
  /// x strictly ascending, all above 0; y above 0 and not falling.
  explicit PowerCurve(std::span<const double> x, std::span<const double> y);
  double operator()(double x) const;

 private:
  std::vector<double> log_x_, log_y_;
};

/// Which series of a table to read, and over how many ranks a micro-batch is spread.
struct LatencyOptions {
  PatternKind pattern = PatternKind::dense;
  Recompute recompute = Recompute::none;
  /// Ranks that share a micro-batch evenly.  A degree without rows of its own divides the rows of
  /// sp = 1; Ulysses then adds its all-to-alls over the `inner` link, else the `dp` link, where the
  /// table has one.
  int sp = 1, cp = 1;
  /// Bytes of q, k, v and o of one token in a layer, for those all-to-alls.
  double exchange_bytes_per_token = 0;
};

/// Perf of SparseBalance: `predict` (Equation 8) over a checked table.
/// Predictions never fall when tokens, prefix or budget grow.  Between lengths, budgets and
/// prefixes it interpolates; above the longest length time grows with the computed pairs.
class LatencyModel {
 public:
  /// Error: a series that the table does not have, with those that it has.
  LatencyModel(const ProfileTable& table, const LatencyOptions& options);

  /// One layer without attention, and the head, over `tokens` tokens of a micro-batch; head is 0
  /// where it was not measured.
  LayerTime rest(std::int64_t tokens) const;
  LayerTime head(std::int64_t tokens) const;
  /// Attention of one segment in one layer; budget 0: this share of every visible key.
  LayerTime attention(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                      double share = 1) const;
  /// One layer of a micro-batch: rest(tokens) + sum over its segments of attention.  `budgets`: one
  /// for each segment, or one for all.
  LayerTime predict(const MicroBatch& micro_batch, std::span<const std::int64_t> budgets) const;
  LayerTime predict(const MicroBatch& micro_batch, std::int64_t budget = 0) const {
    return predict(micro_batch, {&budget, 1});
  }
  /// The all-to-alls of one pass over `tokens` tokens that predict counts; 0 where none are
  /// derived.
  double exchange(std::int64_t tokens) const;
  /// Whether times of options.sp ranks are those of one, divided: rows of several hold their
  /// all-to-alls.
  bool divides_heads() const { return divides_heads_; }
  /// Activation bytes that one layer keeps; 0 where they were not measured.
  double activation_bytes(std::int64_t tokens) const;

 private:
  struct Prefix {
    std::int64_t tokens = 0;
    PowerCurve seconds;  ///< of mean keys a query
  };
  struct Length {
    std::int64_t tokens = 0;
    std::vector<Prefix> prefixes;
  };
  using Grid = std::vector<Length>;  ///< ascending lengths
  /// From rows of attention as a checked table has them: by length, prefix, budget.
  Grid grid_of(std::span<const ProfileRow> rows) const;
  /// What queries compute: a budget, or a share of what they see.
  struct Keys {
    std::int64_t budget = 0;
    double share = 1;
  };
  double seconds(const Grid& grid, std::int64_t query_tokens, std::int64_t prefix_tokens,
                 const Keys& computed) const;
  double at_length(const Length& length, std::int64_t prefix_tokens, const Keys& computed) const;

  std::int64_t block_tokens_ = 64;
  bool divides_heads_ = false;
  double shares_ = 1;       ///< ranks that the measured times of layers are divided by
  double head_shares_ = 1;  ///< and those of the head, which are always of one rank
  double exchange_s_ = 0;   ///< of one token, one pass
  double exchanges_s_ = 0;  ///< latency of one pass
  PowerCurve rest_[2], head_[2], bytes_;
  Grid attention_[2];
};

}  // namespace ballast
