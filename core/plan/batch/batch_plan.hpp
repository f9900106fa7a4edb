// Batching methods: how the samples of a step or an epoch become micro-batches on ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/placement.hpp"

namespace ballast {

/// How the samples of a step become micro-batches on ranks; plan_batch says what each does.
enum class Batching {
  none,
  random,
  sorted,
  isf,
  ffs,
  ffd,
  bfs,
  spfhp,
  packed,
  hbp,
  sab,
  lbb,
  chunkflow,
  balanced
};
template <>
struct EnumNames<Batching> {
  static constexpr EnumTable<Batching, 14> table{{{Batching::none, "none"},
                                                  {Batching::random, "random"},
                                                  {Batching::sorted, "sorted"},
                                                  {Batching::isf, "isf"},
                                                  {Batching::ffs, "ffs"},
                                                  {Batching::ffd, "ffd"},
                                                  {Batching::bfs, "bfs"},
                                                  {Batching::spfhp, "spfhp"},
                                                  {Batching::packed, "packed"},
                                                  {Batching::hbp, "hbp"},
                                                  {Batching::sab, "sab"},
                                                  {Batching::lbb, "lbb"},
                                                  {Batching::chunkflow, "chunkflow"},
                                                  {Batching::balanced, "balanced"}}};
};

/// What is packed at once: each global batch, or the whole epoch, cut into batches of one
/// micro-batch a rank.
enum class BatchScope { step, epoch };
template <>
struct EnumNames<BatchScope> {
  static constexpr EnumTable<BatchScope, 2> table{
      {{BatchScope::step, "step"}, {BatchScope::epoch, "epoch"}}};
};

/// Where the packing groups stand.
enum class GroupSource { deck, profile };
template <>
struct EnumNames<GroupSource> {
  static constexpr EnumTable<GroupSource, 2> table{
      {{GroupSource::deck, "deck"}, {GroupSource::profile, "profile"}}};
};

/// hbp: what happens to a sample above the longest group.
enum class LongSamples { refuse, split };
template <>
struct EnumNames<LongSamples> {
  static constexpr EnumTable<LongSamples, 2> table{
      {{LongSamples::refuse, "refuse"}, {LongSamples::split, "split"}}};
};

/// hbp: how the samples of a packing group become packs.
enum class GroupPacking {
  alike,  ///< sets of packs alike in tokens and attention, one for each of the ranks
  isf     ///< one by one by initial sample fit, as Algorithm 2 of the paper prints
};
template <>
struct EnumNames<GroupPacking> {
  static constexpr EnumTable<GroupPacking, 2> table{
      {{GroupPacking::alike, "alike"}, {GroupPacking::isf, "isf"}}};
};

/// One packing group of Hierarchical Balance Packing.
struct PackGroup {
  std::int64_t tokens = 0;    ///< pack length
  int ranks = 1;              ///< ranks that share a pack: its sequence-parallel degree
  int recompute_layers = -1;  ///< layers recomputed in backward; -1: as the deck says
  bool operator==(const PackGroup&) const = default;
};

struct BatchingOptions {
  Batching method = Batching::packed;
  std::int64_t micro_batch_tokens =
      4096;  ///< pack capacity in tokens; longer samples get a micro-batch of their own
  int dp = 1;
  /// Cost of one visible (query, key) pair in units of one token's matrix products; balances packs
  /// over ranks.
  double pair_cost_tokens = 0;
  std::vector<PackGroup> groups;               ///< hbp: lengths ascend
  GroupPacking packing = GroupPacking::alike;  ///< hbp
  bool balance = true;  ///< hbp: packs and batches of like attention; false: random packs in random
                        ///< order (the paper's ablation)
  std::uint64_t seed = 0;       ///< of every random order
  int micro_batch_samples = 0;  ///< none, sab, lbb: samples of a micro-batch (none: exactly, in
                                ///< order); 0: none 1, sab and lbb as capacity allows
  std::function<double(std::int64_t tokens)> sample_cost;  ///< sab: predicted latency of a sample
  std::int64_t align = 1;                  ///< of every micro-batch; lengths count rounded up to it
  std::vector<PlacementSplit> splits{{}};  ///< balanced: allowed groups
  std::shared_ptr<const PlacementCosts> placement_costs;  ///< balanced: what placement goes by
  int stages = 1, chunk_k = 1;   ///< balanced: PlacementOptions::stages, chunk_k
  std::int64_t chunk_align = 1;  ///< balanced: PlacementOptions::chunk_align
};

/// Whether the method packs whole samples of a step or an epoch: sab and lbb balance a step,
/// chunkflow cuts samples, balanced places a step's.
inline bool packs_whole_samples(Batching method) {
  return method != Batching::sab && method != Batching::lbb && method != Batching::chunkflow &&
         method != Batching::balanced;
}

/// Whether the method balances a step by a weight of each sample, latency or tokens.
inline bool balances_by_weight(Batching method) {
  return method == Batching::sab || method == Batching::lbb;
}

/// Assigns the samples of one global batch.  `none`: one sample (or micro_batch_samples) a
/// micro-batch, dealt round robin in the given order. `packed`: best-fit decreasing into packs of
/// at most micro_batch_tokens, packs dealt heaviest first (tokens and attention pairs) to the least
/// loaded data-parallel rank.  `hbp`: likewise where every group has one rank a pack; else rounds
/// of one group each, their packs alike, the heaviest to the least loaded ranks: ranks [d, d + sp)
/// share a pack, which stands with rank d, and the others hold a micro-batch without segments in
/// that round. `sab`, `lbb`: the two-level partition of core/plan/batch/latency_batching by
/// sample_cost, or by tokens. `balanced`: core/plan/batch/placed_batch. The others: packs as in
/// core/plan/batch/packing, in random order (sorted: in the order of their lengths), dealt round
/// robin.  Every sample appears exactly once; the result depends on the arguments alone.  Errors:
/// dp < 1, groups that cannot pack (core/plan/batch/balance_packing).  A sample without tokens is
/// kept (it costs nothing and counts).
Batch plan_batch(std::int64_t step, const std::vector<SampleLength>& samples,
                 const BatchingOptions& options);

/// The batch of a placement of `samples` that is given, micro-batches as plan_batch makes them.
/// Errors: a pair that was cut.
Batch plan_placed(std::int64_t step, const Placement& placed,
                  const std::vector<SampleLength>& samples, const BatchingOptions& options);

/// A whole epoch packed at once (HBP Section 4.2): each batch is one iteration, in which every
/// data-parallel rank has one micro-batch, alone or shared.  A group's last batch may leave ranks
/// idle.  hbp sorts a group's packs by attention before it cuts batches (Algorithm 7) and shuffles
/// the batches; the baselines shuffle their packs.  Every sample appears exactly once.  Errors: as
/// plan_batch.
std::vector<Batch> plan_epoch(const std::vector<SampleLength>& samples,
                              const BatchingOptions& options);

}  // namespace ballast
