// Loss normalisers: what each token's loss counts in a step's objective (Hierarchical Balance
// Packing, Equation 6), from the Batch plan alone.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/plan/batch/batch.hpp"

namespace ballast {

enum class LossNormaliser { ave_token, token_mean, sample_mean, sum };
template <>
struct EnumNames<LossNormaliser> {
  static constexpr EnumTable<LossNormaliser, 4> table{{{LossNormaliser::ave_token, "ave_token"},
                                                       {LossNormaliser::token_mean, "token_mean"},
                                                       {LossNormaliser::sample_mean, "sample_mean"},
                                                       {LossNormaliser::sum, "sum"}}};
};

/// Whether a token's weight depends on how many loss tokens its micro-batch holds, so that
/// estimates of chunks' will not do.
inline bool weighs_by_chunk(LossNormaliser normaliser) {
  return normaliser == LossNormaliser::token_mean || normaliser == LossNormaliser::sample_mean;
}

/// The objective is the sum over all ranks and micro-batches of weight x token loss.  B
/// micro-batches of the step carry loss; the local batch of Equation 6 is a micro-batch, whichever
/// ranks share it, and the means over data-parallel ranks and accumulated micro-batches are one.
///   ave_token    1 / loss tokens of the global batch: the same for every split (B_g T_ave of
///   Equation 6 is that number) token_mean   1 / (B x loss tokens of the micro-batch) sample_mean
///   1 / (B x segments of the micro-batch that carry loss x loss tokens of the segment) sum 1: the
///   same for every split
/// token_mean and sample_mean depend on which samples share a micro-batch, as the paper argues.
class LossWeights {
 public:
  LossWeights(LossNormaliser normaliser, const Batch& batch);
  /// Weight of every token of a micro-batch; for sample_mean times that of its segment.  ave_token
  /// and sum do not read the micro-batch, so that chunks weigh right whatever their plan estimates;
  /// the other two need exact Segment::loss_tokens, and give 0 where there are none.
  double of(const MicroBatch& micro_batch) const;

 private:
  LossNormaliser normaliser_;
  std::int64_t loss_tokens_ = 0,
               micro_batches_ = 0;  ///< of the global batch; micro-batches that carry loss
};

/// sample_mean: by segment, 1 / its loss tokens, 0 where it has none.  Empty for the others: all 1.
std::vector<double> segment_weights(LossNormaliser normaliser, const MicroBatch& micro_batch);

}  // namespace ballast
