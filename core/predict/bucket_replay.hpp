// What the sharded optimizer holds (parallel/optimizer/zero), and buckets of gradients as it
// reduces them, by their sizes alone: a part of core/predict/memory_replay.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "core/predict/memory_ledger.hpp"
#include "core/predict/memory_replay.hpp"

namespace ballast {

class BucketReplay {
 public:
  /// `element_bytes`: of a master weight, and of what is kept in full.
  BucketReplay(const StageMemory& stage, Ledger& ledger, std::int64_t element_bytes);

  /// Values of `value_bytes` an element, gradients, optimizer state and kept patterns, which stay.
  void hold_state(std::int64_t value_bytes);
  /// Backward adds to the gradients of a layer of the stage, of the head, of the embedding.
  void add_layer(std::int64_t layer);
  void add_head();
  void add_embedding();
  /// As GradientsFinal: starts to reduce what is final, last bucket first.
  void gradients_final(std::int64_t layer);
  /// Reduces what is left, and waits: after a round (ZeRO 2), at the end of the step.
  void end_round();
  void end_step();

 private:
  std::int64_t slice(const ParameterBucket& bucket) const;
  std::int64_t shard() const;  ///< elements of a rank's slices
  std::int64_t gradient_bytes() const { return stage_.bf16_gradients ? 2 : element_bytes_; }
  /// ZeRO 2: a bucket's gradients exist from the first contribution until they are reduced.
  void add(std::size_t bucket);
  void start_reduction(std::size_t bucket);
  void finish_reductions();
  const StageMemory& stage_;
  Ledger& ledger_;
  std::int64_t element_bytes_;
  std::vector<ParameterBucket> buckets_;
  std::size_t left_;                       ///< buckets of the round that are not reduced
  std::map<std::size_t, Held> gradients_;  ///< of buckets
  /// Reductions on their way: what they receive on the host, and under ZeRO 2 the bucket.
  std::vector<Held> received_, reduced_;
  std::int64_t received_bytes_ = 0;
  Held scratch_;  ///< of reductions that find no room among these; kept from then on
};

}  // namespace ballast
