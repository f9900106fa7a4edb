#include "app/train/local_batch.hpp"

#include <algorithm>
#include <span>

#include "core/base/random.hpp"

namespace ballast {

LocalBatch read_local_batch(const Dataset& dataset, const MicroBatch& micro_batch,
                            const std::vector<std::pair<std::int64_t, std::int64_t>>& pieces,
                            Device& device) {
  std::int64_t local = 0;
  for (const auto& [begin, end] : pieces) local += end - begin;
  Tensor tokens = Tensor::empty({local}, DType::i32, host_device(), MemoryCategory::data);
  Tensor targets = Tensor::empty({local}, DType::i32, host_device(), MemoryCategory::data);
  Tensor positions = Tensor::empty({local}, DType::i32, host_device(), MemoryCategory::data);
  LocalBatch batch;
  batch.segment.resize(local);
  const PackedAxis axis(micro_batch);
  std::int64_t at = 0;
  for (const auto& [begin, end] : pieces) {
    for (std::int64_t packed = begin; packed < end;) {
      // The part of this piece that lies in one segment is one range of one sample.
      const int s = axis.segment_of(packed);
      const Segment& segment = micro_batch.segments[s];
      const std::int64_t stop = std::min(end, axis.offset[s + 1]),
                         first = segment.begin + packed - axis.offset[s];
      const std::int64_t count = std::clamp<std::int64_t>(segment.end - first, 0, stop - packed),
                         padding = stop - packed - count;
      if (count > 0) {  // a piece that begins behind a segment's end is padding alone
        const std::int64_t from = segment.origin + first;
        dataset.tokens(segment.sample, from, from + count,
                       std::span(tokens.data<std::int32_t>() + at, count));
        dataset.targets(segment.sample, from, from + count,
                        std::span(targets.data<std::int32_t>() + at, count));
      }
      for (std::int64_t i = 0; i < count; ++i) {
        positions.data<std::int32_t>()[at + i] = static_cast<std::int32_t>(first + i);
        batch.segment[at + i] = s;
      }
      for (std::int64_t i = count; i < count + padding; ++i) {
        tokens.data<std::int32_t>()[at + i] = positions.data<std::int32_t>()[at + i] = 0;
        targets.data<std::int32_t>()[at + i] = -1;
        batch.segment[at + i] = -1;
      }
      at += count + padding;
      packed = stop;
    }
  }
  batch.tokens = tokens.to(device);
  batch.targets = targets.to(device);
  batch.positions = positions.to(device);
  return batch;
}

void name_tokens(LocalBatch& batch, const MicroBatch& micro_batch, std::int64_t step,
                 Device& device) {
  const Tensor positions = batch.positions.to(host_device());
  Tensor keys = Tensor::empty({batch.size()}, DType::i64, host_device(), MemoryCategory::data);
  for (std::int64_t t = 0; t < batch.size(); ++t) {
    const std::int32_t s = batch.segment[static_cast<std::size_t>(t)];
    keys.data<std::int64_t>()[t] = 0;
    if (s < 0) continue;  // padding
    const Segment& segment = micro_batch.segments.at(static_cast<std::size_t>(s));
    keys.data<std::int64_t>()[t] = static_cast<std::int64_t>(random_bits(
        static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(segment.sample),
        static_cast<std::uint64_t>(segment.origin + positions.data<std::int32_t>()[t])));
  }
  batch.dropout_keys = keys.to(device);
}

Tensor token_weights(const std::vector<double>& of_segment,
                     const std::vector<std::int32_t>& segment, DType type, Device& device) {
  if (of_segment.empty()) return {};
  Tensor weights = Tensor::empty({static_cast<std::int64_t>(segment.size())}, type, host_device(),
                                 MemoryCategory::data);
  dispatch_float(type, [&](auto t) {
    for (std::size_t i = 0; i < segment.size(); ++i)
      weights.data<decltype(t)>()[i] = static_cast<decltype(t)>(
          segment[i] < 0 ? 0.0 : of_segment[static_cast<std::size_t>(segment[i])]);
  });
  return weights.to(device);
}

}  // namespace ballast
