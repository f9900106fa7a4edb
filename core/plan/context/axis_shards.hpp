// The axes of all shards of an attention call as one value.
#pragma once
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "core/plan/context/axis_range.hpp"
#include "core/plan/context/sequence_layout.hpp"

namespace ballast {

/// Axes by shard.  Where a layout gives them, a shard's ranges are made whenever they are asked
/// for: fine stripes over many ranks would hold megabytes for as long as the call is planned for.
class AxisShards {
 public:
  AxisShards() = default;
  AxisShards(std::vector<AxisRanges> listed) : listed_(std::move(listed)) {}
  AxisShards(std::initializer_list<AxisRanges> listed) : listed_(listed) {}
  /// Shard r: local_ranges() of rank r, with its errors.
  AxisShards(const MicroBatch& batch, const SequenceLayout& layout) : rule_(Rule{batch, layout}) {}

  std::size_t size() const {
    return rule_ ? static_cast<std::size_t>(rule_->layout.ranks()) : listed_.size();
  }
  bool empty() const { return size() == 0; }
  AxisRanges operator[](std::size_t shard) const;
  bool operator==(const AxisShards& other) const;

 private:
  struct Rule {
    MicroBatch batch;
    SequenceLayout layout;
  };
  std::vector<AxisRanges> listed_;
  std::optional<Rule> rule_;
};

}  // namespace ballast
