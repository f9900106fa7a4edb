// Loss normalisers: what each token's loss counts in a step's objective (Hierarchical Balance
// Packing, Equation 6), from the Batch plan alone.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/plan/batch/batch.hpp"

namespace ballast {

/// What the objective of a run is made of: token losses, or the sigmoid loss of pairs of answers
/// (direct preference optimization, arXiv 2305.18290).
enum class LossKind { cross_entropy, dpo };
template <>
struct EnumNames<LossKind> {
  static constexpr EnumTable<LossKind, 2> table{
      {{LossKind::cross_entropy, "cross_entropy"}, {LossKind::dpo, "dpo"}}};
};

enum class LossNormaliser { ave_token, token_mean, sample_mean, sequence_mean, sum, pair_mean };
template <>
struct EnumNames<LossNormaliser> {
  static constexpr EnumTable<LossNormaliser, 6> table{
      {{LossNormaliser::ave_token, "ave_token"},
       {LossNormaliser::token_mean, "token_mean"},
       {LossNormaliser::sample_mean, "sample_mean"},
       {LossNormaliser::sequence_mean, "sequence_mean"},
       {LossNormaliser::sum, "sum"},
       {LossNormaliser::pair_mean, "pair_mean"}}};
};

/// Whether a token's weight depends on how many loss tokens its micro-batch or segment holds, so
/// that estimates of chunks' will not do.
inline bool weighs_by_chunk(LossNormaliser normaliser) {
  return normaliser != LossNormaliser::ave_token && normaliser != LossNormaliser::sum &&
         normaliser != LossNormaliser::pair_mean;
}

/// Whether segments of a micro-batch weigh differently: segment_weights has something to say.
inline bool weighs_by_segment(LossNormaliser normaliser) {
  return normaliser == LossNormaliser::sample_mean || normaliser == LossNormaliser::sequence_mean;
}

/// The objective is the sum over all ranks and micro-batches of weight x token loss.  B
/// micro-batches of the step carry loss, dependent chunks of a sample counted as one, and S samples
/// do; the local batch of Equation 6 is a micro-batch, whichever ranks share it and however many
/// chunks it is cut into, and the means over data-parallel ranks and accumulated micro-batches are
/// one.
///   ave_token: 1 / loss tokens of the global batch, the same for every split (B_g T_ave of
///   Equation 6 is that number).
///   token_mean: 1 / (B x loss tokens of the micro-batch).
///   sample_mean: 1 / (B x its segments that carry loss x loss tokens of the segment).
///   sequence_mean: 1 / (S x loss tokens of the sample), the same for every split (LongAlign, arXiv
///   2401.18058, loss weighting).
///   sum: 1, the same for every split.
///   pair_mean: 1 / pairs of the global batch, the same for every split; what each token's loss
///   counts in its pair follows from the pair's loss (loss.kind = "dpo").
/// token_mean and sample_mean depend on which samples share a micro-batch, as the paper argues.
class LossWeights {
 public:
  LossWeights(LossNormaliser normaliser, const Batch& batch);
  /// Weight of every token of a micro-batch, times that of its segment.  ave_token and sum do not
  /// read the micro-batch, so that chunks weigh right whatever their plan estimates; the others
  /// need exact Segment::loss_tokens, and give 0 where there are none.
  double of(const MicroBatch& micro_batch) const;

 private:
  LossNormaliser normaliser_;
  std::int64_t loss_tokens_ = 0,
               micro_batches_ = 0,  ///< of the global batch; micro-batches that carry loss
      samples_ = 0,                 ///< that carry loss
      pairs_ = 0;                   ///< or samples, with loss or without
  /// A sample that is cut into dependent chunks.
  struct Whole {
    std::int64_t end = 0, loss_tokens = 0;
  };
  /// The sample that a micro-batch is a chunk of; null where it is none.
  const Whole* whole(const MicroBatch& micro_batch) const;
  std::map<std::int64_t, Whole> cut_;
};

/// Where segments weigh differently: 1 / loss tokens of each, 0 where it has none.  Empty for the
/// other normalisers: all 1.
std::vector<double> segment_weights(LossNormaliser normaliser, const MicroBatch& micro_batch);

}  // namespace ballast
