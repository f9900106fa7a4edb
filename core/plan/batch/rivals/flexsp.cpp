#include "core/plan/batch/rivals/flexsp.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/batch/packing.hpp"
#include "core/plan/batch/rivals/group_lists.hpp"

namespace ballast {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int kBuckets = 16, kMoreMicroBatches = 2;
constexpr std::size_t kLengths = 256;  // that buckets are chosen from

/// Seconds of a group as a sum over its samples, and what it may hold.
class GroupTimes {
 public:
  GroupTimes(const std::vector<PlacementSplit>& splits, const PlacementOptions& options,
             const PlacementCosts& costs)
      : splits_(splits), options_(options), costs_(costs) {
    for (const PlacementSplit& s : splits) {
      // A micro-batch's own time, whatever it holds, counts once.
      const double one = seconds_of(s, 1), two = seconds_of(s, 2);
      base_s_.push_back(std::max(0.0, 2 * one - two));
      most_.push_back(most_tokens(s, options, costs));
    }
  }
  double base_s(std::size_t s) const { return base_s_[s]; }
  std::int64_t most(std::size_t s) const { return most_[s]; }
  double sample_s(std::size_t s, std::int64_t tokens) {
    const auto [at, fresh] = known_.try_emplace({s, tokens}, 0.0);
    if (fresh) at->second = std::max(0.0, seconds_of(splits_[s], tokens) - base_s_[s]);
    return at->second;
  }

 private:
  double seconds_of(const PlacementSplit& split, std::int64_t tokens) const {
    return seconds({{0, 0, tokens, 0}}, split, costs_, options_.align);
  }
  const std::vector<PlacementSplit>& splits_;
  const PlacementOptions& options_;
  const PlacementCosts& costs_;
  std::vector<double> base_s_;
  std::vector<std::int64_t> most_;
  std::map<std::pair<std::size_t, std::int64_t>, double> known_;
};

GroupChoice assign(std::span<const std::int64_t> lengths, const std::vector<int>& counts,
                   GroupTimes& times) {
  GroupChoice found;
  std::vector<std::set<std::pair<double, int>>> by_end(counts.size());
  std::vector<std::int64_t> held;
  for (std::size_t s = 0; s < counts.size(); ++s)
    for (int i = 0; i < counts[s]; ++i) {
      by_end[s].emplace(times.base_s(s), static_cast<int>(found.of.size()));
      found.of.push_back(static_cast<int>(s));
      found.group_s.push_back(times.base_s(s));
      held.push_back(0);
    }
  for (const std::int64_t n : lengths) {
    double least = kNever;
    int best = -1;
    for (std::size_t s = 0; s < counts.size(); ++s)
      for (const auto& [end, g] : by_end[s]) {  // the first with room ends first
        if (held[static_cast<std::size_t>(g)] + n > times.most(s)) continue;
        if (const double ends = end + times.sample_s(s, n); ends < least) least = ends, best = g;
        break;
      }
    found.group.push_back(best);
    if (best < 0) {
      found.longest_s = kNever;
      return found;
    }
    const auto g = static_cast<std::size_t>(best);
    auto& ends = by_end[static_cast<std::size_t>(found.of[g])];
    ends.erase({found.group_s[g], best});
    held[g] += n, found.group_s[g] = least;
    ends.emplace(least, best);
    found.longest_s = std::max(found.longest_s, least);
  }
  return found;
}

/// Goes from counts to better ones, one cut or join at a time, the best first.
class GroupSearcher {
 public:
  GroupSearcher(std::span<const std::int64_t> lengths, const std::vector<PlacementSplit>& splits,
                const PlacementOptions& options, const PlacementCosts& costs)
      : lengths_(lengths), splits_(splits), options_(options), times_(splits, options, costs) {}

  GroupChoice run() {
    for (std::size_t s = 0; s < splits_.size(); ++s) {
      std::vector<int> counts(splits_.size(), 0);
      counts[s] = options_.ranks / splits_[s].ranks;
      climb(counts);
    }
    // Half of the ranks in groups of one size, half in single ones: mixes that no climb from
    // groups of one size may pass.
    for (std::size_t s = 1; s < splits_.size(); ++s) {
      std::vector<int> counts(splits_.size(), 0);
      counts[s] = std::max(1, options_.ranks / splits_[s].ranks / 2);
      counts[0] = (options_.ranks - counts[s] * splits_[s].ranks) / splits_[0].ranks;
      climb(counts);
    }
    return best_;
  }

 private:
  double look(const std::vector<int>& counts) {
    const auto [at, fresh] = seen_.try_emplace(counts, kNever);
    if (!fresh) return at->second;
    GroupChoice found = assign(lengths_, counts, times_);
    at->second = found.longest_s;
    if (best_.of.empty() || found.longest_s < best_.longest_s) best_ = std::move(found);
    return at->second;
  }
  void climb(std::vector<int> counts) {
    for (double now = look(counts);;) {
      std::vector<int> to;
      double least = now;
      const auto consider = [&](const std::vector<int>& next) {
        if (const double s = look(next); s < least) least = s, to = next;
      };
      for (std::size_t s = 1; s < splits_.size(); ++s) {
        std::vector<int> cut = counts, join = counts;
        if (counts[s] > 0) --cut[s], cut[s - 1] += 2, consider(cut);
        if (counts[s - 1] > 1) join[s - 1] -= 2, ++join[s], consider(join);
      }
      if (to.empty()) return;
      counts = to, now = least;
    }
  }

  std::span<const std::int64_t> lengths_;
  const std::vector<PlacementSplit>& splits_;
  const PlacementOptions& options_;
  GroupTimes times_;
  std::map<std::vector<int>, double> seen_;
  GroupChoice best_;
};

/// Sorted samples in `count` parts of about equal tokens.
std::vector<std::vector<std::uint32_t>> parts(const std::vector<SampleLength>& samples,
                                              const std::vector<std::uint32_t>& order,
                                              std::int64_t tokens, int count) {
  std::vector<std::vector<std::uint32_t>> list(1);
  std::int64_t sum = 0;
  for (const std::uint32_t i : order) {
    sum += samples[i].tokens;
    list.back().push_back(i);
    if (sum * count >= tokens * static_cast<std::int64_t>(list.size()) &&
        static_cast<int>(list.size()) < count)
      list.emplace_back();
  }
  std::erase_if(list, [](const auto& part) { return part.empty(); });
  return list;
}

/// The micro-batch of every group that has samples, on the aligned block that is free first.
bool add_groups(const std::vector<SampleLength>& samples, const std::vector<std::uint32_t>& part,
                const std::vector<PlacementSplit>& splits, const PlacementOptions& options,
                const PlacementCosts& costs, std::vector<PlacedMicroBatch>& list,
                std::vector<double>& end) {
  std::vector<std::int64_t> lengths;
  for (const std::uint32_t i : part) lengths.push_back(samples[i].tokens);
  const std::vector<std::int64_t> ends = length_buckets(lengths, kBuckets);
  std::int64_t widest = 0;
  for (std::size_t s = 0; s < splits.size(); ++s)
    widest = std::max(widest, most_tokens(splits[s], options, costs));
  for (std::int64_t& n : lengths)
    n = std::min(widest, *std::lower_bound(ends.begin(), ends.end(), n));
  const GroupChoice groups = choose_groups(lengths, splits, options, costs);
  if (groups.longest_s == kNever) return false;
  std::vector<std::size_t> order(groups.of.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return groups.of[a] != groups.of[b] ? groups.of[a] > groups.of[b]
                                        : groups.group_s[a] > groups.group_s[b];
  });
  std::vector<double> next = end;
  std::vector<bool> taken(end.size(), false);
  for (const std::size_t g : order) {
    const PlacementSplit& split = splits[static_cast<std::size_t>(groups.of[g])];
    std::vector<double> free = end;
    for (std::size_t r = 0; r < free.size(); ++r)
      if (taken[r]) free[r] = kNever;
    const int first = earliest_block(free, split.ranks);
    PlacedMicroBatch m{{}, first, split};
    for (std::size_t i = 0; i < part.size(); ++i)
      if (groups.group[i] == static_cast<int>(g))
        m.segments.push_back(whole(samples[part[i]]).front());
    std::fill_n(taken.begin() + first, split.ranks, true);
    if (m.segments.empty()) continue;
    const auto begin = end.begin() + first;
    std::fill_n(next.begin() + first, split.ranks,
                *std::max_element(begin, begin + split.ranks) + groups.group_s[g]);
    list.push_back(std::move(m));
  }
  end = std::move(next);
  return true;
}

}  // namespace

std::vector<std::int64_t> length_buckets(std::span<const std::int64_t> lengths, int count) {
  std::map<std::int64_t, std::int64_t> histogram;
  for (const std::int64_t n : lengths) ++histogram[n];
  std::vector<std::int64_t> ends, items{0}, tokens{0};  // sums up to an end
  const std::size_t apart = histogram.size() / kLengths + 1;
  std::int64_t item_sum = 0, token_sum = 0;
  std::size_t place = 0;
  for (const auto& [n, times] : histogram) {
    item_sum += times, token_sum += times * n;
    if (++place % apart != 0 && place != histogram.size()) continue;
    ends.push_back(n), items.push_back(item_sum), tokens.push_back(token_sum);
  }
  const std::size_t size = ends.size();
  if (size == 0) return {};
  const auto buckets = std::min(size, static_cast<std::size_t>(std::max(1, count)));
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::vector<std::vector<std::int64_t>> lost(buckets + 1,
                                              std::vector<std::int64_t>(size + 1, kMost));
  std::vector<std::vector<std::size_t>> from(buckets + 1, std::vector<std::size_t>(size + 1, 0));
  lost[0][0] = 0;
  for (std::size_t b = 1; b <= buckets; ++b)
    for (std::size_t e = b; e <= size; ++e)
      for (std::size_t begin = b - 1; begin < e; ++begin) {
        if (lost[b - 1][begin] == kMost) continue;
        const std::int64_t sum = lost[b - 1][begin] + ends[e - 1] * (items[e] - items[begin]) -
                                 (tokens[e] - tokens[begin]);
        if (sum < lost[b][e]) lost[b][e] = sum, from[b][e] = begin;
      }
  std::vector<std::int64_t> chosen;
  for (std::size_t b = buckets, e = size; b > 0; e = from[b][e], --b) chosen.push_back(ends[e - 1]);
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

GroupChoice assign_groups(std::span<const std::int64_t> lengths, const std::vector<int>& counts,
                          const std::vector<PlacementSplit>& splits,
                          const PlacementOptions& options, const PlacementCosts& costs) {
  GroupTimes times(splits, options, costs);
  return assign(lengths, counts, times);
}

GroupChoice choose_groups(std::span<const std::int64_t> lengths,
                          const std::vector<PlacementSplit>& splits,
                          const PlacementOptions& options, const PlacementCosts& costs) {
  return GroupSearcher(lengths, splits, options, costs).run();
}

Placement flexsp_placement(const std::vector<SampleLength>& samples,
                           const PlacementOptions& options, const PlacementCosts& costs) {
  const std::vector<PlacementSplit> splits = powers_of_two(options);
  std::vector<std::int64_t> lengths;
  std::int64_t tokens = 0, widest = 0;
  for (const PlacementSplit& s : splits) widest = std::max(widest, most_tokens(s, options, costs));
  for (const SampleLength& s : samples) {
    require(s.tokens <= widest,
            "a sample of {} tokens fits the memory of no group of up to {} ranks", s.tokens,
            splits.back().ranks);
    lengths.push_back(s.tokens);
    tokens += s.tokens;
  }
  const std::vector<std::uint32_t> order = longest_first(lengths);
  const std::int64_t room = std::max<std::int64_t>(
      1, most_tokens(splits.front(), options, costs) * options.ranks / splits.front().ranks);
  Placement best;
  int count = static_cast<int>(std::max<std::int64_t>(1, (tokens + room - 1) / room));
  const int all = std::max<int>(1, static_cast<int>(samples.size()));
  for (int tried = 0; tried <= kMoreMicroBatches && count <= all;) {
    std::vector<PlacedMicroBatch> list;
    std::vector<double> end(static_cast<std::size_t>(options.ranks), 0.0);
    bool fits = true;
    for (const auto& part : parts(samples, order, tokens, count))
      fits = fits && add_groups(samples, part, splits, options, costs, list, end);
    ++count;
    if (!fits) continue;  // too full: one more micro-batch
    ++tried;
    Placement found = in_order(std::move(list), options, costs);
    if (best.ranks.empty() || found.step_s < best.step_s) best = std::move(found);
  }
  require(!best.ranks.empty(), "no groups hold the step's samples");
  return best;
}

}  // namespace ballast
