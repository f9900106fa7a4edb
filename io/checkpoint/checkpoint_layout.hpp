// What a checkpoint holds, in logical terms: datasets under full shapes, fixed ranges for
// checksums, and which part of them a shard covers. Plain values; the only calls to other ranks are
// in agree_layout and counted_part.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint/checkpoint.hpp"

namespace ballast {

/// One field ("master", "moment1" ...) of one parameter.
struct CheckpointDataset {
  std::string parameter, field;
  Shape shape;
  DType type = DType::f32;
  std::uint64_t offset = 0;  ///< of its first element in the file
  std::int64_t numel() const;
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(numel()) * size_of(type); }
  std::string group() const { return "/parameters/" + parameter; }
  std::string path() const { return group() + "/" + field; }
  bool operator==(const CheckpointDataset&) const = default;
};

/// Elements [begin, end) of a dataset, under one checksum.
struct ChecksumRange {
  std::size_t dataset = 0;
  std::int64_t begin = 0, end = 0;
};
inline constexpr std::int64_t kChecksumElements = std::int64_t{1} << 20;
std::vector<ChecksumRange> checksum_ranges(const std::vector<CheckpointDataset>& datasets);
/// Ranges [first, last) that `rank` of `size` checks: neighbours, about equal bytes; every range
/// belongs to one rank.
std::pair<std::size_t, std::size_t> ranges_of_rank(const std::vector<CheckpointDataset>& datasets,
                                                   const std::vector<ChecksumRange>& ranges,
                                                   int rank, int size);

/// Number of the first checksum range of each dataset, and behind the last one their total.
std::vector<std::size_t> first_ranges(const std::vector<CheckpointDataset>& datasets);
/// The dataset of a parameter's field, or null; `datasets` are sorted.
const CheckpointDataset* find_dataset(const std::vector<CheckpointDataset>& datasets,
                                      const std::string& parameter, const std::string& field);

/// A field's elements [first, first + count) of a parameter, which are elements [at, at + count) of
/// the shard's tensor and [element, element + count) of the flat buffer, in one of the shard's
/// runs.
struct ShardPart {
  const Parameter& parameter;
  const std::string& field;
  const Tensor& tensor;
  std::int64_t first = 0, count = 0, at = 0, element = 0;
  std::size_t run = 0;
};
/// Of every parameter that the shard touches and every field that it has.
void for_each_part(const CheckpointShard& shard,
                   const std::function<void(const ShardPart&)>& visit);

/// Datasets of a file that all ranks' shards fill, sorted by parameter and field, the same on every
/// rank.  Collective.  Errors, on every rank: shards that leave an element out or offer it twice,
/// other fields or dtypes on some rank, one name with two shapes.
std::vector<CheckpointDataset> agree_layout(const Communicator& world,
                                            const CheckpointShard& shard);

/// The elements [begin, end) of each run of this rank's shard that it alone adds to sums over all
/// ranks: each element of a table counts once, however many ranks hold it.  `complete`: the shards
/// of all ranks together cover their tables.  Collective.
struct CountedPart {
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
  bool complete = false;
};
CountedPart counted_part(const Communicator& world, const CheckpointShard& shard);

/// Throws Error when a shard contradicts itself: no table, a range outside it, a field of another
/// size or dtype.
void check_shard(const CheckpointShard& shard);

}  // namespace ballast
