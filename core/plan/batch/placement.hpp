// Placement: the samples of one step on groups of ranks of different size, side by side, so that
// every rank is busy for the same time.  Long samples get as many ranks as they need and no more;
// short ones are packed on what is left.
// In the field: FlexSP (arXiv 2412.01523) and ByteScale (arXiv 2502.21231) solve the same problem;
// this is a greedy over predicted seconds that plans 1,024 ranks in milliseconds.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/plan/batch/batch.hpp"

namespace ballast {

/// How `ranks` adjacent ranks of the row share a micro-batch: Ulysses over `sp` times a ring of
/// `ring`, in which the mesh's own cp and sp are counted.
struct PlacementSplit {
  int ranks = 1;
  int sp = 1, ring = 1;
  bool operator==(const PlacementSplit&) const = default;
};

/// What placement asks of a cost model; seconds are those of one pipeline stage, forward and
/// backward, of each of the ranks that share the work evenly.  Sparse budgets are the cost model's.
class PlacementCosts {
 public:
  virtual ~PlacementCosts() = default;
  /// Everything but attention and transfers, of `tokens` tokens of a micro-batch.
  virtual double rest_s(std::int64_t tokens, const PlacementSplit& split) const = 0;
  /// Attention of one segment of `query_tokens` tokens behind `prefix_tokens`.
  virtual double attention_s(std::int64_t query_tokens, std::int64_t prefix_tokens,
                             const PlacementSplit& split) const = 0;
  /// Exchanges of heads, and the ring's hops that `attention_s` seconds of attention do not hide.
  virtual double transfer_s(std::int64_t tokens, double attention_s,
                            const PlacementSplit& split) const = 0;
  /// Peak bytes of one rank while it computes `tokens` tokens behind a stored prefix; grows with
  /// either.  Compared with PlacementOptions::memory_bytes alone, so the unit is the caller's.
  virtual double bytes(std::int64_t tokens, std::int64_t prefix_tokens,
                       const PlacementSplit& split) const = 0;
};

struct PlacementOptions {
  int ranks = 1;  ///< of the row: mesh.dp
  /// Allowed splits, ascending in ranks; several of one size may stand side by side.  The first is
  /// the smallest and the one of short samples.
  std::vector<PlacementSplit> splits{{}};
  /// Groups begin at multiples of their size.  False: of the largest power of two that divides it.
  bool aligned = false;
  std::int64_t micro_batch_tokens = 4096;  ///< capacity of a pack of short samples
  double memory_bytes = 0;                 ///< of a rank; 0: no limit
  int stages = 1;                          ///< pipeline stages that every micro-batch goes through
  std::int64_t align = 1;                  ///< samples count by axis_tokens(sample, align)
  std::int64_t chunk_align = 1;            ///< chunks begin at multiples of it and of `align`
  int chunk_k = 1;  ///< chunks of a sample whose activations are kept (ChunkFlow's K)
  double forward_share = 1.0 / 3;  ///< of a micro-batch's seconds: what a second forward adds
};

/// A micro-batch on ranks [first, first + split.ranks).
struct PlacedMicroBatch {
  std::vector<Segment> segments;  ///< never empty
  int first = 0;
  PlacementSplit split;
  double seconds = 0;  ///< predicted, of one stage
};

struct Placement {
  /// In an order of start that is the same for every rank: ranks that share micro-batches meet in
  /// it without a deadlock.  Chunks of a sample follow each other on one group.
  std::vector<PlacedMicroBatch> micro_batches;
  std::vector<std::vector<int>> ranks;  ///< [rank]: its micro-batches, in that order
  double step_s = 0;   ///< predicted: the last rank's end, on the pipeline's last stage
  double bound_s = 0;  ///< rank-seconds of all samples at the smallest split, over ranks
  /// Ranks without any micro-batch.
  int idle_ranks() const;
};

/// Why these options cannot place anything, one sentence each.
std::vector<std::string> problems(const PlacementOptions& options);

/// Places every sample exactly once.  A sample that fits the memory of no group is cut into chunks
/// that run one after another on the group with the least rank-seconds.  For a pipeline, whose
/// stages wait where micro-batches are long or differ, smaller packs and larger groups for short
/// samples are tried too. Deterministic: the order of `samples` decides between equal lengths
/// alone.  O(n log n + long samples x ranks).  Errors: problems(options), a negative length, a
/// sample of which not even a chunk of the least length fits.
Placement place(const std::vector<SampleLength>& samples, const PlacementOptions& options,
                const PlacementCosts& costs);

/// Seconds of one stage of a micro-batch by these costs, each segment rounded up to `align`.
double seconds(const std::vector<Segment>& segments, const PlacementSplit& split,
               const PlacementCosts& costs, std::int64_t align);

}  // namespace ballast
