// What the deck says of the attention pattern, as one value for planner and executors.
#pragma once
#include <cstdint>
#include <string>

#include "core/generated_index.hpp"

namespace ballast {

struct AttentionOptions {
  std::string pattern = "dense";
  bool generated = false;      ///< made-up vertical-slash indexes in place of the pattern's own rule
  GeneratedPattern generator;  ///< of `generated`; its tokens are the planner's

  /// Indexes are cut in blocks of 64, so segments, shards and stripes start at multiples of 64.
  bool sparse() const { return generated || pattern != "dense"; }
  std::int64_t align() const { return sparse() ? kBlock : 1; }
};

}  // namespace ballast
