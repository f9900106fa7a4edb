// Batch plan: what each data-parallel rank computes in one step.  Built by pure functions from
// lengths.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ballast {

/// Tokens [begin, end) of a sample.  begin == 0 everywhere is a packed micro-batch; begin > 0 is a
/// dependent chunk that attends to the stored keys and values of [0, begin).
struct Segment {
  std::int64_t sample = 0;  ///< index in the dataset
  std::int64_t begin = 0, end = 0;
  std::int64_t loss_tokens =
      0;  ///< tokens of this segment that carry loss; of a chunk of a masked sample an estimate
  std::int64_t tokens() const { return end - begin; }
  bool operator==(const Segment&) const = default;
};

/// Segments computed together, concatenated along one packed axis.
struct MicroBatch {
  std::vector<Segment> segments;
  int sp = 1;                 ///< sequence-parallel degree (HBP); 1 without adaptive SP
  int recompute_layers = -1;  ///< layers recomputed in backward; -1: as the deck says
  /// Segments start at multiples of this on the packed axis, which ends at one (sparse patterns:
  /// 64); what lies between is padding.
  std::int64_t align = 1;
  std::int64_t tokens() const;
  /// Length of the packed axis: tokens and padding.
  std::int64_t axis_tokens() const;
  std::int64_t loss_tokens() const;
  /// Sum over segments of visible (query, key) pairs: n (begin + (n + 1) / 2) for n tokens.
  double attention_pairs() const;
  bool operator==(const MicroBatch&) const = default;
};

/// One step: micro_batches[d] is the list of data-parallel rank d, in execution order.  Ranks [d, d
/// + sp), d a multiple of sp, share a micro-batch of sp > 1: it stands with rank d, the others hold
/// one without segments, of the same sp, at the same place of their lists.
struct Batch {
  std::int64_t step = 0;
  std::vector<std::vector<MicroBatch>> micro_batches;
  std::int64_t loss_tokens() const;  ///< of the whole global batch: the `ave_token` normaliser
  std::int64_t tokens() const;
  std::int64_t samples() const;  ///< distinct samples (segments with begin == 0)
  /// What data-parallel rank `dp` works on: its own micro-batches, and for those of sp > 1 the one
  /// that the first of its sp neighbouring ranks holds, of which each computes a part.
  std::vector<MicroBatch> work_of(int dp) const;
  /// Order-sensitive 64-bit hash, written to the trace.
  std::uint64_t hash() const;
};

/// Length of one sample of the step's global batch.
struct SampleLength {
  std::int64_t sample = 0;
  std::int64_t tokens = 0;
  std::int64_t loss_tokens = 0;
};

/// One packing group of Hierarchical Balance Packing.
struct PackGroup {
  std::int64_t tokens = 0;    ///< pack length
  int ranks = 1;              ///< ranks that share a pack: its sequence-parallel degree
  int recompute_layers = -1;  ///< layers recomputed in backward; -1: as the deck says
  bool operator==(const PackGroup&) const = default;
};

struct BatchingOptions {
  std::string method = "packed";  ///< none | packed | random | sorted | isf | ffs | ffd | bfs |
                                  ///< spfhp | hbp | sab | lbb | chunkflow
  std::int64_t micro_batch_tokens =
      4096;  ///< pack capacity in tokens; longer samples get a micro-batch of their own
  int dp = 1;
  /// Cost of one visible (query, key) pair in units of one token's matrix products; balances packs
  /// over ranks.
  double pair_cost_tokens = 0;
  std::vector<PackGroup> groups;  ///< hbp: lengths ascend
  bool balance = true;  ///< hbp: packs and batches of like attention; false: random packs in random
                        ///< order (the paper's ablation)
  std::uint64_t seed = 0;       ///< of every random order
  int micro_batch_samples = 0;  ///< none, sab, lbb: samples of a micro-batch (none: exactly, in
                                ///< order); 0: none 1, sab and lbb as capacity allows
  std::function<double(std::int64_t tokens)> sample_cost;  ///< sab: predicted latency of a sample
  std::int64_t align = 1;  ///< of every micro-batch; lengths count rounded up to it
};

/// Names of the methods that pack whole samples of a step or an epoch (sab and lbb balance a step,
/// chunkflow cuts samples), in the order of the papers' tables: none random sorted isf ffs ffd bfs
/// spfhp packed hbp.
const std::vector<std::string>& batching_methods();

/// Assigns the samples of one global batch.  `none`: one sample (or micro_batch_samples) a
/// micro-batch, dealt round robin in the given order. `packed`: best-fit decreasing into packs of
/// at most micro_batch_tokens, packs dealt heaviest first (tokens and attention pairs) to the least
/// loaded data-parallel rank.  `hbp`: likewise where every group has one rank a pack; else rounds
/// of one group each, their packs alike, the heaviest to the least loaded ranks: ranks [d, d + sp)
/// share a pack, which stands with rank d, and the others hold a micro-batch without segments in
/// that round. `sab`, `lbb`: the two-level partition of core/sab by sample_cost, or by tokens. The
/// others: packs as in core/packing, in random order, dealt round robin.  Every sample appears
/// exactly once; the result depends on the arguments alone.  Errors: unknown method, dp < 1, groups
/// that cannot pack (core/hbp).  A sample without tokens is kept (it costs nothing and counts).
Batch plan_batch(std::int64_t step, const std::vector<SampleLength>& samples,
                 const BatchingOptions& options);

/// A whole epoch packed at once (HBP Section 4.2): each batch is one iteration, in which every
/// data-parallel rank has one micro-batch, alone or shared.  A group's last batch may leave ranks
/// idle.  hbp sorts a group's packs by attention before it cuts batches (Algorithm 7) and shuffles
/// the batches; the baselines shuffle their packs.  Every sample appears exactly once.  Errors: as
/// plan_batch.
std::vector<Batch> plan_epoch(const std::vector<SampleLength>& samples,
                              const BatchingOptions& options);

}  // namespace ballast
