#include "core/predict/group_selection.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/error.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

double alone(const PackCosts& costs, const PackGroup& group) {
  return costs.bytes(std::span(&group, 1));
}

class Selector {
 public:
  Selector(const GroupSearch& search,
           const std::function<std::vector<MicroBatch>(std::int64_t)>& packs,
           const PackCosts& costs)
      : search_(search), packs_(packs), costs_(costs) {}

  /// Algorithm 3 over `degrees`.
  GroupTrial best(std::int64_t tokens, const std::vector<int>& degrees) {
    const std::vector<MicroBatch> packs = packs_(tokens);
    GroupTrial best{tokens, degrees.front(), 0, 0, kNever};
    for (const int ranks : degrees) {
      GroupTrial trial{tokens, ranks, recomputed_layers(tokens, ranks, search_, costs_), 0, kNever};
      const bool fits = trial.recompute_layers >= 0;
      if (!fits) trial.recompute_layers = search_.layers;
      trial.bytes = alone(costs_, {tokens, ranks, trial.recompute_layers});
      double seconds = 0, held = 0;
      for (const MicroBatch& pack : packs) {
        seconds += costs_.seconds(pack, ranks, trial.recompute_layers);
        held += static_cast<double>(pack.tokens());
      }
      if (fits && held > 0) trial.token_s = seconds * ranks / held;
      result.trials.push_back(trial);
      if (trial.token_s < best.token_s) best = trial;
    }
    return best;
  }

  GroupSelection result;

 private:
  const GroupSearch& search_;
  const std::function<std::vector<MicroBatch>(std::int64_t)>& packs_;
  const PackCosts& costs_;
};

}  // namespace

int recomputed_layers(std::int64_t tokens, int ranks, const GroupSearch& search,
                      const PackCosts& costs) {
  if (search.memory_bytes <= 0) return 0;
  const double none = search.memory_bytes - alone(costs, {tokens, ranks, 0}),
               all = search.memory_bytes - alone(costs, {tokens, ranks, search.layers});
  if (none >= 0) return 0;
  if (all < 0) return -1;
  const double a_layer = (all - none) / search.layers;  // above 0, as none < 0 <= all
  int layers =
      std::clamp(static_cast<int>(std::ceil(search.layers - all / a_layer)), 0, search.layers);
  // Memory need not be linear in the layers: what the line promises is looked up.
  while (layers < search.layers && alone(costs, {tokens, ranks, layers}) > search.memory_bytes)
    ++layers;
  return layers;
}

GroupSelection select_groups(const GroupSearch& search,
                             const std::function<std::vector<MicroBatch>(std::int64_t)>& packs,
                             const PackCosts& costs) {
  require(!search.lengths.empty() && !search.degrees.empty(),
          "group selection needs pack lengths and degrees to try");
  Selector select(search, packs, costs);
  std::vector<GroupTrial> found;  // Algorithm 1, stage 1
  for (const std::int64_t tokens : search.lengths)
    found.push_back(select.best(tokens, search.degrees));
  const GroupTrial best = *std::min_element(
      found.begin(), found.end(),
      [](const GroupTrial& a, const GroupTrial& b) { return a.token_s < b.token_s; });
  const GroupTrial longest = found.back();
  require(std::isfinite(longest.token_s),
          "group selection: packs of {} tokens fit into {:.3g} GiB at no degree up to {}, not even "
          "with all layers recomputed",
          longest.tokens, search.memory_bytes / (1 << 30), search.degrees.back());

  std::vector<GroupTrial> groups;  // stage 2
  const auto derive = [&](const GroupTrial& from, int ranks) {
    if (from.ranks == 1) return;
    const GroupTrial part = select.best(from.tokens / from.ranks, {ranks});
    if (std::isfinite(part.token_s)) groups.push_back(part);
  };
  derive(best, 1);
  groups.push_back(best);
  if (longest.tokens / longest.ranks > best.tokens) derive(longest, best.ranks);
  groups.push_back(longest);
  std::stable_sort(groups.begin(), groups.end(),
                   [](const GroupTrial& a, const GroupTrial& b) { return a.tokens < b.tokens; });
  for (const GroupTrial& g : groups) {
    // Equal lengths are one group; degrees must not fall, so a shorter group never takes more ranks
    // than a longer one.
    if (!select.result.groups.empty() && select.result.groups.back().tokens == g.tokens)
      select.result.groups.pop_back();
    while (!select.result.groups.empty() && select.result.groups.back().ranks > g.ranks)
      select.result.groups.pop_back();
    select.result.groups.push_back({g.tokens, g.ranks, g.recompute_layers});
  }
  return std::move(select.result);
}

std::vector<PackGroup> refine_groups(
    const GroupSelection& selection,
    const std::function<double(const std::vector<PackGroup>&)>& seconds) {
  std::vector<PackGroup> best = selection.groups;
  const std::int64_t longest = best.back().tokens;
  double best_s = seconds(best);
  const auto sound = [&](const std::vector<PackGroup>& groups) {
    if (groups.empty() || groups.back().tokens != longest) return false;
    return std::is_sorted(groups.begin(), groups.end(),
                          [](const PackGroup& a, const PackGroup& b) { return a.ranks < b.ranks; });
  };
  for (bool better = true; better;) {
    std::vector<std::vector<PackGroup>> changed;
    for (std::size_t g = 0; g < best.size(); ++g) {
      changed.push_back(best);
      changed.back().erase(changed.back().begin() + static_cast<std::ptrdiff_t>(g));
    }
    for (const GroupTrial& t : selection.trials) {
      if (!std::isfinite(t.token_s) || t.tokens > longest) continue;
      const PackGroup group{t.tokens, t.ranks, t.recompute_layers};
      changed.push_back(best);
      auto& list = changed.back();
      const auto at = std::lower_bound(
          list.begin(), list.end(), group,
          [](const PackGroup& a, const PackGroup& b) { return a.tokens < b.tokens; });
      if (at != list.end() && at->tokens == group.tokens)
        *at = group;
      else
        list.insert(at, group);
    }
    better = false;
    std::vector<PackGroup> next;
    for (const auto& groups : changed) {
      if (groups == best || !sound(groups)) continue;
      const double s = seconds(groups);
      if (s >= best_s * 0.999) continue;
      best_s = s, next = groups, better = true;
    }
    if (better) best = next;
  }
  return best;
}

GroupSelection select_groups_together(
    const GroupSearch& search, const std::function<std::vector<MicroBatch>(std::int64_t)>& packs,
    const PackCosts& costs, const GroupedRun& run, bool refine) {
  const double limit = search.memory_bytes > 0 ? search.memory_bytes : kNever;
  const auto within = [&](const std::vector<PackGroup>& groups) {
    return costs.bytes(groups) > limit ? kNever : run.seconds(groups);
  };
  const auto together = [&](const std::vector<PackGroup>& groups) {
    return std::max(costs.bytes(groups), costs.step_bytes(run.first_steps(groups), groups));
  };
  const auto has_room = [&](const GroupSearch& lower) {
    return lower.memory_bytes > 0 && std::ranges::any_of(lower.degrees, [&](int ranks) {
             return recomputed_layers(lower.lengths.back(), ranks, lower, costs) >= 0;
           });
  };
  GroupSearch lower = search;
  while (true) {
    GroupSelection found = select_groups(lower, packs, costs);
    if (refine) found.groups = refine_groups(found, within);
    found.bytes = together(found.groups);
    if (found.bytes <= limit) return found;
    // Below what one of them needs alone, so that a setting changes.
    double most_alone = 0;
    for (const PackGroup& group : found.groups)
      most_alone = std::max(most_alone, alone(costs, group));
    lower.memory_bytes = std::min(lower.memory_bytes - (found.bytes - limit), most_alone - 1);
    if (has_room(lower)) continue;
    found.groups.erase(found.groups.begin(), found.groups.end() - 1);
    found.bytes = together(found.groups);
    return found;
  }
}

}  // namespace ballast
