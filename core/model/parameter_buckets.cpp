#include "core/model/parameter_buckets.hpp"

#include <algorithm>

#include "core/base/error.hpp"

namespace ballast {

std::vector<ParameterBucket> parameter_buckets(const std::vector<Parameter>& trainable,
                                               std::int64_t bytes) {
  require(bytes >= 1, "buckets of {} bytes", bytes);
  // Neighbours of one layer; what has no layer is the embedding or the head.
  const auto final_layer = [](const Parameter& p) -> std::int64_t {
    const bool embedding = p.name == "model.embed_tokens.weight" && !p.tied_copy;
    return p.layer >= 0 || embedding ? p.layer : kHeadLayer;
  };
  std::vector<ParameterBucket> units;
  for (std::size_t i = 0; i < trainable.size(); ++i) {
    const Parameter& p = trainable[i];
    const std::int64_t final_at = final_layer(p);
    if (units.empty() || units.back().final_at != final_at) units.push_back({i, i, 0, final_at});
    units.back().last = i + 1;
    units.back().elements += p.numel();
  }
  std::vector<ParameterBucket> buckets;
  const std::int64_t most = bytes == kOneBucket ? kOneBucket : bytes / 4;
  for (std::size_t u = units.size(); u-- > 0;) {
    const ParameterBucket& unit = units[u];
    if (buckets.empty() || (most != kOneBucket && buckets.back().elements + unit.elements > most)) {
      buckets.push_back(unit);
      continue;
    }
    buckets.back().first = unit.first;
    buckets.back().elements += unit.elements;
    buckets.back().final_at = std::min(buckets.back().final_at, unit.final_at);
  }
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

}  // namespace ballast
