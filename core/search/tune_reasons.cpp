#include "core/search/tune_reasons.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "core/predict/memory_replay.hpp"

namespace ballast {
namespace {

constexpr double kEven = 0.9;  // load balance above which ranks wait for stages, not for each other
constexpr double kSame = 1e-6;  // of a step: less is rounding

/// What ranks wait for.
std::string waits(const Trial& t) {
  if (t.idle_ranks >= 1) return fmt::format("waits ({:.0f} idle ranks)", t.idle_ranks);
  if (t.load_balance >= kEven && t.candidate.mesh.pp > 1) return "pipeline bubble";
  return fmt::format("waits for the slowest rank (load balance {:.2f})", t.load_balance);
}

/// Where a kind of choice stands among others.
int rank_of_kind(const std::string& kind) {
  static const std::vector<std::string> order{
      "method", "pp", "sp",      "ring",      "layout", "schedule", "micro-batch",
      "chunk",  "k",  "offload", "recompute", "zero",   "budget"};
  return static_cast<int>(std::find(order.begin(), order.end(), kind) - order.begin());
}

/// Of a choice that no plan which fits was simulated with; the second: what to sort it by.
std::pair<Loss, double> without_time(const ChoiceFacts& facts, const Trial& best,
                                     const TuneLimits& limits) {
  Loss loss;
  const double bound = facts.least_bound_s / best.first_step_s,
               estimate = facts.least_estimate_s / best.first_step_s;
  if (bound > 1) {
    loss.why = fmt::format("at least {:.3g} x, by its lower bound", bound);
    return {loss, bound};
  }
  if (estimate > 0) {
    loss.why = fmt::format(
        "not simulated{}",
        estimate > 1 ? fmt::format(": about {:.3g} x by estimate", estimate) : "; see --trials");
    return {loss, std::max(1.0, estimate)};
  }
  if (facts.least_bytes > 0)
    loss.why =
        fmt::format("over memory by {} at least",
                    bytes_text(static_cast<double>(facts.least_bytes) - limits.memory_bytes));
  else if (!facts.refused.empty())
    loss.why = "refused: " + facts.refused;
  else
    loss.why = "not needed: a lighter plan fits memory";
  return {loss, 1e9};
}

}  // namespace

std::string largest_difference(const Trial& slower, const Trial& faster) {
  const auto a = slower.terms.list(), b = faster.terms.list();
  std::size_t most = 0;
  for (std::size_t i = 1; i < a.size(); ++i)
    if (a[i].second - b[i].second > a[most].second - b[most].second) most = i;
  const double more_s = a[most].second - b[most].second;
  if (more_s <= kSame * slower.first_step_s) return "nothing of the first step takes longer";
  const std::string what = a[most].first == "bubble" ? waits(slower) : a[most].first;
  return fmt::format("{} {:+.3g} s", what, more_s);
}

std::string nothing_fits(const TuneResult& result, const TuneLimits& limits) {
  std::int64_t least = 0;
  std::string refused;
  for (const auto& [facet, facts] : result.choices) {
    if (facts.least_bytes > 0)
      least = least == 0 ? facts.least_bytes : std::min(least, facts.least_bytes);
    if (refused.empty()) refused = facts.refused;
  }
  if (least == 0) return fmt::format("no plan of {} ranks can run: {}", limits.ranks, refused);
  return fmt::format(
      "no plan of {} ranks fits {} a rank: the smallest that was found needs {}; give more ranks, "
      "more memory or a smaller model or context",
      limits.ranks, bytes_text(limits.memory_bytes), bytes_text(static_cast<double>(least)));
}

std::vector<Loss> losses(const TuneResult& result, const TuneLimits& limits) {
  std::vector<Loss> list;
  if (result.best.empty()) return list;
  const Trial& best = result.best.front();
  std::set<std::pair<std::string, std::string>> chosen;
  for (const auto& facet : facets(best.candidate)) chosen.insert(facet);
  std::vector<std::tuple<int, double, Loss>> rows;
  for (const auto& [facet, facts] : result.choices) {
    if (chosen.count(facet) != 0) continue;
    Loss loss;
    double order = 0;
    if (facts.best.empty()) {
      std::tie(loss, order) = without_time(facts, best, limits);
    } else {
      const Trial& t = facts.best.front();
      loss.plan = describe(t.candidate);
      order = loss.slower = t.first_step_s / best.first_step_s;
      loss.why = largest_difference(t, best);
    }
    loss.choice = facet.first + " " + facet.second;
    rows.emplace_back(rank_of_kind(facet.first), order, std::move(loss));
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  for (auto& [kind, order, loss] : rows) list.push_back(std::move(loss));
  return list;
}

}  // namespace ballast
