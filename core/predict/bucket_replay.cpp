#include "core/predict/bucket_replay.hpp"

#include <algorithm>

#include "core/base/reduction_space.hpp"
#include "core/model/fp8_specs.hpp"

namespace ballast {
BucketReplay::BucketReplay(const StageMemory& stage, Ledger& ledger, std::int64_t element_bytes)
    : stage_(stage), ledger_(ledger), element_bytes_(element_bytes), buckets_(stage.buckets) {
  if (buckets_.empty()) buckets_.push_back({0, 0, stage.parameters, -1});
  left_ = buckets_.size();
}

std::int64_t BucketReplay::slice(const ParameterBucket& bucket) const {
  return (bucket.elements + stage_.replicas - 1) / stage_.replicas;
}

std::int64_t BucketReplay::shard() const {
  std::int64_t elements = 0;
  for (const ParameterBucket& bucket : buckets_) elements += slice(bucket);
  return elements;
}

void BucketReplay::hold_state(std::int64_t value_bytes) {
  const std::int64_t own = shard(),
                     padded = own * stage_.replicas,  // so that it divides over the shards
      owned = stage_.zero == 0 ? padded : own;
  // Values themselves serve as master weights where the shard is one range of them.
  const bool wide = value_bytes == element_bytes_ &&
                    (stage_.zero == 0 || stage_.replicas == 1 || buckets_.size() == 1);
  ledger_.add(MemoryCategory::parameters, (padded + stage_.frozen) * value_bytes);
  if (stage_.fp8)
    ledger_.add(MemoryCategory::parameters,
                stage_.layers * fp8_weight_bytes(stage_.model, stage_.host));
  ledger_.add(MemoryCategory::gradients,
              stage_.zero == 2 ? own * element_bytes_ : padded * gradient_bytes());
  // Two moments, of Muon's elements one, and master weights.
  const std::int64_t moments = 2 * owned - heaviest(stage_.muon).elements,
                     moment_bytes = stage_.bf16_moments ? 2 : element_bytes_;
  ledger_.add(MemoryCategory::optimizer,
              moments * moment_bytes + (wide ? 0 : owned * element_bytes_));
  ledger_.add(MemoryCategory::workspace, stage_.kept_index_bytes);
}

void BucketReplay::add(std::size_t bucket) {
  if (stage_.zero < 2 || gradients_.count(bucket) != 0) return;
  gradients_.emplace(bucket, Held(ledger_, MemoryCategory::gradients,
                                  slice(buckets_[bucket]) * stage_.replicas * gradient_bytes()));
}

void BucketReplay::add_layer(std::int64_t layer) {
  std::size_t b = buckets_.size() - 1;
  while (b > 0 && buckets_[b].final_at > stage_.first_layer + layer) --b;
  add(b);
}

void BucketReplay::add_head() {
  if (!stage_.last || stage_.model.lora.enabled()) return;
  add(buckets_.size() - 1);
  if (stage_.first && stage_.model.tied_embedding) add(0);
}

void BucketReplay::add_embedding() {
  if (stage_.first && !stage_.model.lora.enabled()) add(0);
}

void BucketReplay::start_reduction(std::size_t bucket) {
  if (stage_.zero == 2) finish_reductions();
  add(bucket);  // with zeros where nobody has added
  const std::int64_t bytes = slice(buckets_[bucket]) * stage_.replicas * gradient_bytes();
  if (stage_.zero == 2) reduced_.push_back(std::move(gradients_.extract(bucket).mapped()));
  if (!stage_.host || stage_.replicas == 1) return;
  if (received_bytes_ + bytes <= kReductionBytes) {
    received_.emplace_back(ledger_, MemoryCategory::communication, bytes);
    received_bytes_ += bytes;
    return;
  }
  // In parts, when it is completed.
  const std::int64_t parts = std::min(kReductionBytes / stage_.replicas * stage_.replicas, bytes);
  if (scratch_.bytes() == 0) scratch_ = Held(ledger_, MemoryCategory::communication, 0);
  scratch_.grow(std::max<std::int64_t>(0, parts - scratch_.bytes()));
}

void BucketReplay::finish_reductions() {
  received_.clear();
  reduced_.clear();
  received_bytes_ = 0;
}

void BucketReplay::gradients_final(std::int64_t layer) {
  while (left_ > 0 && buckets_[left_ - 1].final_at >= layer) start_reduction(--left_);
}

void BucketReplay::end_round() {
  if (stage_.zero < 2) return;
  gradients_final(-1);
  finish_reductions();
  left_ = buckets_.size();
}

void BucketReplay::end_step() {
  if (stage_.zero < 2) gradients_final(-1);
  finish_reductions();
  left_ = buckets_.size();
}

}  // namespace ballast
