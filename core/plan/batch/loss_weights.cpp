#include "core/plan/batch/loss_weights.hpp"

#include <algorithm>

#include "core/base/error.hpp"

namespace ballast {

LossWeights::LossWeights(LossNormaliser normaliser, const Batch& batch)
    : normaliser_(normaliser), loss_tokens_(batch.loss_tokens()) {
  for (const auto& list : batch.micro_batches)
    for (const MicroBatch& m : list) micro_batches_ += m.loss_tokens() > 0;
}

double LossWeights::of(const MicroBatch& micro_batch) const {
  // These two do not ask how many of the tokens are here: of a chunk that is known only roughly.
  if (normaliser_ == LossNormaliser::ave_token)
    return loss_tokens_ > 0 ? 1.0 / static_cast<double>(loss_tokens_) : 0.0;
  if (normaliser_ == LossNormaliser::sum) return 1;
  const std::int64_t tokens = micro_batch.loss_tokens();
  if (tokens == 0) return 0;
  const auto over = [](std::int64_t a, std::int64_t b) {
    return 1.0 / (static_cast<double>(a) * static_cast<double>(b));
  };
  if (normaliser_ == LossNormaliser::token_mean) return over(micro_batches_, tokens);
  return over(micro_batches_,
              std::count_if(micro_batch.segments.begin(), micro_batch.segments.end(),
                            [](const Segment& s) { return s.loss_tokens > 0; }));
}

std::vector<double> segment_weights(LossNormaliser normaliser, const MicroBatch& micro_batch) {
  std::vector<double> weights;
  if (normaliser != LossNormaliser::sample_mean) return weights;
  for (const Segment& s : micro_batch.segments)
    weights.push_back(s.loss_tokens > 0 ? 1.0 / static_cast<double>(s.loss_tokens) : 0.0);
  return weights;
}

}  // namespace ballast
