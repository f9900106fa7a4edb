#include "core/plan/context/axis_shards.hpp"

#include "core/base/error.hpp"

namespace ballast {

AxisRanges AxisShards::operator[](std::size_t shard) const {
  require(shard < size(), "shard {} of {}", shard, size());
  return rule_ ? local_ranges(rule_->batch, rule_->layout, static_cast<int>(shard))
               : listed_[shard];
}

bool AxisShards::operator==(const AxisShards& other) const {
  if (size() != other.size()) return false;
  for (std::size_t shard = 0; shard < size(); ++shard)
    if ((*this)[shard] != other[shard]) return false;
  return true;
}

}  // namespace ballast
