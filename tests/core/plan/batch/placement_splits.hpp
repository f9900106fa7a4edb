// Groups that samples may be placed on in tests.
#pragma once
#include <vector>

#include "core/plan/batch/placement.hpp"

namespace ballast {

/// Splits of 1, 2, 3, 4, 6, 8, 12, ... ranks up to `ranks`: Ulysses over the largest divisor that
/// divides the heads, the rest as a ring.
inline std::vector<PlacementSplit> placement_splits(int ranks, int query_heads, int kv_heads) {
  std::vector<PlacementSplit> splits;
  const auto add = [&](int group) {
    if (group > ranks) return;
    int sp = 1;
    for (int d = 1; d <= group; ++d)
      if (group % d == 0 && kv_heads % d == 0 && query_heads % d == 0) sp = d;
    splits.push_back({group, sp, group / sp});
  };
  add(1);
  for (int power = 2; power <= ranks; power *= 2) {
    add(power);
    add(power / 2 * 3);
  }
  return splits;
}

}  // namespace ballast
