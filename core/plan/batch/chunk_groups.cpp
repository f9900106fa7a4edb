#include "core/plan/batch/chunk_groups.hpp"

#include <cstdint>
#include <map>
#include <utility>

#include "core/base/error.hpp"

namespace ballast {

ChunkGroups chunk_groups(const std::vector<MicroBatch>& list) {
  ChunkGroups groups;
  std::map<std::int64_t, std::pair<std::size_t, std::int64_t>>
      open;  // sample -> group, tokens so far
  for (int m = 0; m < static_cast<int>(list.size()); ++m) {
    const auto& segments = list[m].segments;
    if (segments.size() == 1 && segments[0].begin > 0) {
      const auto found = open.find(segments[0].sample);
      require(found != open.end() && found->second.second == segments[0].begin,
              "pipeline schedule: micro-batch {} begins at token {} of sample {}, and the chunk "
              "before it is not in the list",
              m, segments[0].begin, segments[0].sample);
      groups[found->second.first].push_back(m);
      found->second.second = segments[0].end;
      continue;
    }
    for (const Segment& s : segments)
      require(s.begin == 0,
              "pipeline schedule: micro-batch {} mixes a dependent chunk with other segments", m);
    if (segments.size() == 1) open[segments[0].sample] = {groups.size(), segments[0].end};
    groups.push_back({m});
  }
  return groups;
}

}  // namespace ballast
