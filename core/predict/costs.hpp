// Costs: what the parts of a training step take, in seconds.  The clock (core/predict/simulate)
// composes them and asks nothing else, so plans made from a profile table, from stated costs and
// from built-in rates are timed by the same rules.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "core/model/recompute_options.hpp"
#include "core/plan/context/mesh_links.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "core/plan/step_plan.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/pattern_work.hpp"

namespace ballast {

/// Forward and backward of one layer's part.  `backward_s` holds `weight_s` (weight gradients) and
/// `recompute_s` (forward that runs again under recompute).
struct PassTime {
  double forward_s = 0, backward_s = 0, weight_s = 0, recompute_s = 0;
  PassTime& operator+=(const PassTime& other) {
    forward_s += other.forward_s, backward_s += other.backward_s;
    weight_s += other.weight_s, recompute_s += other.recompute_s;
    return *this;
  }
  double total_s() const { return forward_s + backward_s; }
};

/// A sum over replicas, or what every one of them gets from all: what decides its time.
struct Collective {
  std::int64_t elements = 0;
  int ranks = 1;           ///< that take part
  Link link = Link::node;  ///< the slowest between them
  bool scattered = false;  ///< every rank ends with its share alone (or begins with it)
  bool full = false;       ///< of sums that are kept full, whatever gradients are kept in
};

class Costs {
 public:
  virtual ~Costs() = default;
  /// Where the times come from, for titles: "times of profile.h5".
  virtual std::string source() const = 0;

  /// Times of one rank when the ranks of `split` share `tokens` of a micro-batch evenly: a layer
  /// without its attention; the embedding, final norm and head with its loss.
  virtual PassTime rest(std::int64_t tokens, const ContextSplit& split, Recompute mode) const = 0;
  virtual PassTime head(std::int64_t tokens, const ContextSplit& split) const = 0;
  /// Attention of one segment in one layer, shared evenly likewise.  `budget`: key blocks a query;
  /// 0: every visible key, or what pattern() leaves of them.
  virtual PassTime attention(std::int64_t query_tokens, std::int64_t prefix_tokens,
                             std::int64_t budget, const ContextSplit& split,
                             Recompute mode) const = 0;
  /// The sparse pattern that is timed where no budget counts its pairs; null: all visible ones.
  virtual const PatternWork* pattern() const { return nullptr; }
  /// What a pass of a layer takes on a stage of `stage_layers` of them, in units of the above: 1
  /// where layers were measured; 1 / stage_layers where a whole stage's time is stated.
  virtual double layer_scale(std::int64_t stage_layers) const;

  /// Ulysses: the all-to-alls of one pass of one layer (q, k, v before attention, o after it).
  /// `link`, here and below: what they take by the plan's mesh (core/plan/context/mesh_links.hpp);
  /// costs are of any mesh.
  virtual double exchange(std::int64_t tokens, const ContextSplit& split, Link link) const = 0;
  /// Ring: one hop of a shard's keys and values, or of their gradients.
  virtual double ring_hop(std::int64_t tokens, const ContextSplit& split, RingLevel level,
                          bool gradients, Link link) const = 0;
  /// Ring: the passes over memory by which one pass of a layer joins the partial results of its
  /// shards, beside attention (parallel/context/ring_attention.cpp): outputs in forward, gradients
  /// of keys and values in backward.
  virtual double ring_sums(std::int64_t tokens, const ContextSplit& split, bool gradients) const;
  /// Activations or gradients of a micro-batch to the neighbour stage.
  virtual double stage_hop(std::int64_t tokens, const ContextSplit& split, Link link) const = 0;
  /// A chunk's stage input to or from host memory.
  virtual double host_copy(std::int64_t tokens, const ContextSplit& split) const = 0;

  virtual double reduce(const Collective& sum) const = 0;
  virtual double gather(const Collective& all) const = 0;
  /// Update of the elements whose optimizer state one rank owns; `full_gradients`: their gradients
  /// are kept full whatever others are (optimizer.zero = 2).
  virtual double optimizer(std::int64_t elements, bool full_gradients) const = 0;
  /// Matrix products of the optimizer (Muon) on one rank.
  virtual double products(double) const { return 0; }
};

inline double Costs::layer_scale(std::int64_t) const { return 1; }
inline double Costs::ring_sums(std::int64_t, const ContextSplit&, bool) const { return 0; }

/// Mean keys that a query computes: by `budget`, else those that `pattern` (null: all) leaves.
double computed_keys(std::int64_t query_tokens, std::int64_t prefix_tokens, std::int64_t budget,
                     std::int64_t block_tokens, const PatternWork* pattern);

/// One layer of a whole micro-batch: rest of its packed axis + attention of its segments
/// (SparseBalance Equation 8), no transfer counted.
PassTime layer_time(const Costs& costs, const MicroBatch& micro_batch, std::int64_t budget,
                    const ContextSplit& split, Recompute mode);

/// Seconds of one layer over a whole sample, forward and backward: what batching.method = "sab"
/// balances (SparseBalance Equation 8).  `budget`: the average of those that such samples had; 0:
/// the pattern has none.
double sample_seconds(const Costs& costs, std::int64_t tokens, double budget,
                      const ContextSplit& split, Recompute mode);

/// Largest of `candidates` (ascending) whose layer takes at most `target_s`, forward and backward
/// (SparseBalance Equation 9); the smallest where none does.
std::int64_t align_budget(const Costs& costs, const MicroBatch& micro_batch, double target_s,
                          std::span<const std::int64_t> candidates, const ContextSplit& split,
                          Recompute mode);

}  // namespace ballast
