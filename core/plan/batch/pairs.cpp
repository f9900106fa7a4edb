#include "core/plan/batch/pairs.hpp"

#include <map>

#include "core/base/error.hpp"

namespace ballast {

namespace {

using Pairs = std::map<std::int64_t, const SampleLength*>;

void separate(MicroBatch& micro_batch, const Pairs& pairs, std::int64_t fits) {
  std::vector<Segment> separate;
  for (const Segment& whole : micro_batch.segments) {
    const auto found = pairs.find(whole.sample);
    if (found == pairs.end()) {
      separate.push_back(whole);
      continue;
    }
    const SampleLength& pair = *found->second;
    require(
        whole.begin == 0 && whole.end == pair.tokens,
        "pair {} of {} tokens (chosen {}, rejected {}) does not fit one micro-batch, which "
        "holds {} at most, padding to a sparse pattern's blocks included; both answers must lie in "
        "one: raise batching.micro_batch_tokens or make "
        "the pairs with a lower --max-tokens",
        pair.sample, pair.tokens, pair.chosen_tokens, pair.tokens - pair.chosen_tokens, fits);
    separate.push_back({pair.sample, 0, pair.chosen_tokens, pair.chosen_loss_tokens, 0});
    separate.push_back({pair.sample, 0, pair.tokens - pair.chosen_tokens,
                        pair.loss_tokens - pair.chosen_loss_tokens, pair.chosen_tokens});
  }
  micro_batch.segments = std::move(separate);
}

}  // namespace

void separate_pairs(std::span<Batch> batches, const std::vector<SampleLength>& samples,
                    std::int64_t fits) {
  Pairs pairs;
  for (const SampleLength& s : samples)
    if (s.chosen_tokens > 0) pairs[s.sample] = &s;
  if (pairs.empty()) return;
  for (Batch& batch : batches)
    for (auto& list : batch.micro_batches)
      for (MicroBatch& micro_batch : list) separate(micro_batch, pairs, fits);
}

std::vector<std::int64_t> document_lengths(const SampleLength& s) {
  if (s.chosen_tokens == 0) return {s.tokens};
  return {s.chosen_tokens, s.tokens - s.chosen_tokens};
}

}  // namespace ballast
