#include "core/plan/batch/rivals/wlb_llm.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/batch/packing.hpp"
#include "core/plan/batch/rivals/group_lists.hpp"

namespace ballast {
namespace {

struct Pack {
  std::vector<Segment> segments;
  std::int64_t tokens = 0;
  double work_s = 0;
};

/// `count` packs of at most `capacity` tokens; nothing where a document finds no room.
std::optional<std::vector<Pack>> packed(const std::vector<SampleLength>& samples,
                                        const std::vector<std::uint32_t>& order,
                                        const std::vector<double>& work_s, std::size_t count,
                                        std::int64_t capacity) {
  std::vector<Pack> packs(count);
  for (const std::uint32_t i : order) {
    Pack* least = nullptr;
    for (Pack& p : packs)
      if (p.tokens + samples[i].tokens <= capacity && (!least || p.work_s < least->work_s))
        least = &p;
    if (!least) return std::nullopt;
    least->segments.push_back(whole(samples[i]).front());
    least->tokens += samples[i].tokens;
    least->work_s += work_s[i];
  }
  return packs;
}

}  // namespace

Placement wlb_llm_placement(const std::vector<SampleLength>& samples,
                            const PlacementOptions& options, const PlacementSplit& split,
                            const PlacementCosts& costs) {
  require(options.ranks % split.ranks == 0, "groups of {} ranks do not divide a row of {}",
          split.ranks, options.ranks);
  const std::int64_t capacity = most_tokens(split, options, costs);
  const auto groups = static_cast<std::size_t>(options.ranks / split.ranks);
  std::vector<std::int64_t> lengths;
  std::vector<double> work_s;
  std::int64_t tokens = 0;
  for (const SampleLength& s : samples) {
    require(s.tokens <= capacity, "a sample of {} tokens does not fit the memory of {} ranks",
            s.tokens, split.ranks);
    lengths.push_back(s.tokens);
    work_s.push_back(seconds(whole(s), split, costs, options.align));
    tokens += s.tokens;
  }
  const std::vector<std::uint32_t> order = longest_first(lengths);
  const auto room = capacity * static_cast<std::int64_t>(groups);
  auto rounds = static_cast<std::size_t>(std::max<std::int64_t>(1, (tokens + room - 1) / room));
  std::optional<std::vector<Pack>> packs;
  for (; !packs; ++rounds) packs = packed(samples, order, work_s, groups * rounds, capacity);

  std::stable_sort(packs->begin(), packs->end(),
                   [](const Pack& a, const Pack& b) { return a.work_s > b.work_s; });
  std::vector<double> load(groups, 0.0);
  std::vector<PlacedMicroBatch> list;
  for (Pack& p : *packs) {
    if (p.segments.empty()) continue;
    const auto least = std::min_element(load.begin(), load.end());
    *least += p.work_s;
    list.push_back(
        {std::move(p.segments), static_cast<int>(least - load.begin()) * split.ranks, split});
  }
  return in_order(std::move(list), options, costs);
}

}  // namespace ballast
