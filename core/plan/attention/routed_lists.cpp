#include "core/plan/attention/routed_lists.hpp"

#include <algorithm>

#include "core/plan/context/axis_range.hpp"

namespace ballast {

RoutedLists routed_lists(const RoutedAxis& axis, std::span<const std::uint64_t> words) {
  const int query_blocks = axis.query_blocks(), group = axis.q_heads / axis.kv_heads;
  RoutedLists out;
  out.offset = {0};
  out.places.assign(static_cast<std::size_t>(axis.q_heads) * query_blocks * kBlock * axis.slots,
                    -1);
  for (int list = 0; list < axis.lists(); ++list) {
    const int chunk = list / axis.blocks / axis.kv_heads, block = list % axis.blocks,
              kv_head = list / axis.blocks % axis.kv_heads;
    const int last = std::min((chunk + 1) * kRoutedChunk, query_blocks);
    for (int b = chunk * kRoutedChunk; b < last; ++b) {
      if (axis.listed(b) == 0 || block < axis.first[b] || block >= axis.own[b]) continue;
      for (int g = 0; g < group; ++g) {
        const std::int64_t head = kv_head * group + g;
        const std::uint64_t word =
            words[(head * query_blocks + b) * axis.width + block - axis.first[b]];
        for (int row = 0; row < kBlock; ++row) {
          if (!(word >> row & 1)) continue;
          const std::int64_t token = std::int64_t{b} * kBlock + row;
          std::int32_t* place =
              out.places.data() + (head * query_blocks * kBlock + token) * axis.slots;
          *std::find(place, place + axis.slots, -1) = static_cast<std::int32_t>(out.entries.size());
          out.entries.push_back(routed_entry(token, g));
        }
      }
    }
    out.offset.push_back(static_cast<std::int64_t>(out.entries.size()));
  }
  return out;
}

}  // namespace ballast
