#include "core/plan/batch/loss_weights.hpp"

#include <algorithm>

#include "core/plan/batch/chunk_groups.hpp"

namespace ballast {
namespace {

/// Segments that carry loss.
std::int64_t carrying(const MicroBatch& micro_batch) {
  return std::count_if(micro_batch.segments.begin(), micro_batch.segments.end(),
                       [](const Segment& s) { return s.loss_tokens > 0; });
}

}  // namespace

LossWeights::LossWeights(LossNormaliser normaliser, const Batch& batch)
    : normaliser_(normaliser), loss_tokens_(batch.loss_tokens()), pairs_(batch.samples()) {
  for (const auto& list : batch.micro_batches)
    for (const auto& group : chunk_groups(list)) {
      const MicroBatch& first = list[static_cast<std::size_t>(group.front())];
      if (group.size() == 1) {
        micro_batches_ += first.loss_tokens() > 0;
        samples_ += carrying(first);
        continue;
      }
      Whole whole;
      for (const int m : group) {
        const Segment& s = list[static_cast<std::size_t>(m)].segments.front();
        whole.loss_tokens += s.loss_tokens;
        whole.end = s.end;
      }
      micro_batches_ += whole.loss_tokens > 0;
      samples_ += whole.loss_tokens > 0;
      cut_[first.segments.front().sample] = whole;
    }
}

const LossWeights::Whole* LossWeights::whole(const MicroBatch& micro_batch) const {
  if (micro_batch.segments.size() != 1) return nullptr;
  const Segment& s = micro_batch.segments.front();
  const auto found = cut_.find(s.sample);
  return found == cut_.end() || s.tokens() == found->second.end ? nullptr : &found->second;
}

double LossWeights::of(const MicroBatch& micro_batch) const {
  // These do not ask how many of the tokens are here: of a chunk that is known only roughly.
  if (normaliser_ == LossNormaliser::ave_token)
    return loss_tokens_ > 0 ? 1.0 / static_cast<double>(loss_tokens_) : 0.0;
  if (normaliser_ == LossNormaliser::sum) return 1;
  if (normaliser_ == LossNormaliser::pair_mean)
    return pairs_ > 0 ? 1.0 / static_cast<double>(pairs_) : 0.0;
  const std::int64_t tokens = micro_batch.loss_tokens();
  if (tokens == 0) return 0;
  const auto over = [](std::int64_t a, std::int64_t b) {
    return 1.0 / (static_cast<double>(a) * static_cast<double>(b));
  };
  const bool by_sample = normaliser_ == LossNormaliser::sequence_mean;
  const std::int64_t parts = by_sample ? samples_ : micro_batches_;
  // A chunk's part of its sample; its segment's weight is 1 / its own loss tokens.
  if (const Whole* sample = whole(micro_batch))
    return over(parts, sample->loss_tokens) *
           (weighs_by_segment(normaliser_) ? static_cast<double>(tokens) : 1);
  if (by_sample) return over(parts, 1);
  return over(parts, normaliser_ == LossNormaliser::token_mean ? tokens : carrying(micro_batch));
}

std::vector<double> segment_weights(LossNormaliser normaliser, const MicroBatch& micro_batch) {
  std::vector<double> weights;
  if (!weighs_by_segment(normaliser)) return weights;
  for (const Segment& s : micro_batch.segments)
    weights.push_back(s.loss_tokens > 0 ? 1.0 / static_cast<double>(s.loss_tokens) : 0.0);
  return weights;
}

}  // namespace ballast
