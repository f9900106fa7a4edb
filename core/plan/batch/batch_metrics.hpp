// Balance of Batch plans: Hierarchical Balance Packing Equations 1 to 3, from the plans alone.
#pragma once
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

/// Packs of one group (of all, for methods without groups).
struct GroupMetrics {
  PackGroup group;
  std::int64_t samples = 0, tokens = 0, packs = 0, tail_packs = 0;
  std::int64_t batches =
      0;  ///< full ones that hold this group alone; dbr, pr and abr are means over them
  double dbr = 0, pr = 0, abr = 0;
  std::vector<std::int64_t> fill;  ///< packs by tokens / length, in kBins equal parts of [0, 1]
  std::vector<std::int64_t> attention;  ///< packs by sum of squared lengths / length^2, likewise
  std::vector<std::int64_t>
      lengths;  ///< samples by length: entry b counts [2^(b-1), 2^b), entry 0 those without tokens
  static constexpr int kBins = 20;
};

struct BatchMetrics {
  std::int64_t samples = 0, tokens = 0, packs = 0, batches = 0;
  std::int64_t longest = 0;     ///< sample, in tokens
  std::int64_t tail_packs = 0;  ///< packs of batches that are not full; no part of dbr, pr and abr
                                ///< unless every batch is such
  double dbr = 0;               ///< balance ratio of tokens over ranks, mean over full batches
  double pr = 0;        ///< padding ratio of packs: t_max is the pack length; padded to the longest
                        ///< sample for none and sorted
  double abr = 0;       ///< balance ratio of attention (sum of squared lengths) over ranks
  double cr = 0;        ///< share of tokens in packs that several ranks share
  double cr_bound = 0;  ///< hbp: share of tokens in samples longer than every group of one rank: no
                        ///< plan has a lower cr
  double ave_t = 0;     ///< tokens of a rank in a batch, mean over all batches
  /// Share of the variance of log length that the step explains: near batches / samples where steps
  /// are drawn at random, 1 where each step holds one length.  The more alike a
  /// step's samples are, the more its gradient is biased.
  double length_share = 0;
  std::vector<GroupMetrics> groups;
};

/// Sums plans up.  A micro-batch with sp > 1 spreads evenly over its ranks.
class BatchMeter {
 public:
  /// `shared_ranks`: ranks that share every micro-batch on top of its sp (cp x sp of the mesh).
  BatchMeter(const BatchingOptions& options, int shared_ranks = 1);
  void add(const Batch& batch, bool full);
  BatchMetrics result() const;

  /// Whether no rank is idle in any round of an epoch's batch.
  static bool is_full(const Batch& batch);

 private:
  /// Tokens of each sample of a batch, its chunks or answers joined.
  using Lengths = std::unordered_map<std::int64_t, std::int64_t>;
  static Lengths lengths_of(const Batch& batch);
  void add_lengths(const Lengths& lengths);

  struct Sums {
    double dbr = 0, pr = 0, abr = 0;
    std::int64_t batches = 0;
    void add(double d, double p, double a);
  };
  /// A micro-batch in numbers.
  struct Pack {
    double tokens = 0, squares = 0;  ///< sums over its segments
    double padding = 0;              ///< ratio
    std::int64_t longest = 0;        ///< segment
    std::size_t group = 0;
  };
  Pack pack_of(const MicroBatch& micro_batch) const;
  /// Index of the group of a sample of `tokens`, or of a pack whose longest sample has as many.
  std::size_t group(std::int64_t tokens) const;
  void count(const MicroBatch& micro_batch, const Pack& pack, const Lengths& lengths, bool full);
  BatchingOptions options_;
  int shared_ranks_;
  BatchMetrics counts_;
  Sums full_, all_;
  std::vector<Sums> group_full_;
  double communicating_ = 0, needing_ = 0;
  double logs_ = 0, log_squares_ = 0, step_squares_ = 0, logged_ = 0;  ///< of log lengths
};

}  // namespace ballast
