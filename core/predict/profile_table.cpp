#include "core/predict/profile_table.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "core/base/error.hpp"
#include "core/plan/attention/block_budget.hpp"
#include "core/predict/latency_model.hpp"

namespace ballast {
namespace {

/// Rows that form one grid.
using Series = std::tuple<ProfilePart, std::string, int, std::string, ProfilePass>;
Series series_of(const ProfileRow& r) {
  return {r.part, pattern_text(r), r.sp, name(r.recompute), r.pass};
}
auto point_of(const ProfileRow& r) { return std::tuple(r.query_tokens, r.prefix_tokens, r.budget); }

std::string describe_series(const ProfileRow& r) {
  return fmt::format("{}{}{}, sp {}, recompute {}, {}", name(r.part), r.pattern ? " " : "",
                     pattern_text(r), r.sp, name(r.recompute), name(r.pass));
}

std::int64_t covering_budget(const ProfileRow& r, std::int64_t block) {
  return blocks_of_keys(r.query_tokens + r.prefix_tokens, block);
}

constexpr const char* kRemedy = "measure the table again with `ballast profile`";

/// Rows of one point become one.  Only budgets that cover all keys may differ in what they were
/// called.
void join_equal_points(
    std::vector<ProfileRow>& series,
    const std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& stated) {
  std::vector<ProfileRow> joined;
  for (const ProfileRow& r : series) {
    if (joined.empty() || point_of(joined.back()) != point_of(r)) {
      joined.push_back(r);
      continue;
    }
    require(stated.size() == series.size(), "profile table: two rows for {}; {}", describe(r),
            kRemedy);
    joined.back().median_s = std::sqrt(joined.back().median_s * r.median_s);
  }
  series = std::move(joined);
}

/// Refuses lengths whose smallest or largest needed budget is missing; notes the holes that
/// interpolation fills.
void check_holes(const std::vector<ProfileRow>& series, std::int64_t block,
                 std::vector<std::string>& notes) {
  const ProfileRow& first = series.front();
  std::set<std::int64_t> budgets;
  std::map<std::pair<std::int64_t, std::int64_t>, std::set<std::int64_t>> at;
  for (const ProfileRow& r : series) {
    budgets.insert(r.budget);
    at[{r.query_tokens, r.prefix_tokens}].insert(r.budget);
  }
  std::set<std::int64_t> lengths, prefixes;
  for (const auto& [key, unused] : at) lengths.insert(key.first), prefixes.insert(key.second);
  for (const std::int64_t n : lengths) {
    require(at.count({n, 0}) > 0, "profile table: {}: no row of {} tokens without a prefix; {}",
            describe_series(first), n, kRemedy);
    for (const std::int64_t p : prefixes)
      if (at.count({n, p}) == 0)
        notes.push_back(fmt::format("{}: {} tokens after {} were not measured and are interpolated",
                                    describe_series(first), n, p));
  }
  if (first.part != ProfilePart::attention) return;
  const auto covering = [&](const auto& key) {
    return blocks_of_keys(key.first + key.second, block);
  };
  budgets.clear();  // those that leave something out
  for (const auto& [key, measured] : at)
    for (const std::int64_t b : measured)
      if (b < covering(key)) budgets.insert(b);
  if (budgets.empty()) return;
  for (const auto& [key, measured] : at) {
    const std::int64_t least = std::min(*budgets.begin(), covering(key)),
                       most = std::min(*budgets.rbegin(), covering(key));
    const std::int64_t missing = *measured.begin() > least   ? least
                                 : *measured.rbegin() < most ? most
                                                             : 0;
    require(missing == 0,
            "profile table: {}: {} tokens after {} lack budget {}, which nothing can be "
            "interpolated from; {}",
            describe_series(first), key.first, key.second, missing, kRemedy);
    for (const std::int64_t b : budgets)
      if (b > least && b < most && measured.count(b) == 0 &&
          at[{*lengths.rbegin(), key.second}].count(b) > 0)
        notes.push_back(
            fmt::format("{}: budget {} at {} tokens after {} was not measured and is interpolated",
                        describe_series(first), b, key.first, key.second));
  }
}

/// Over few keys choosing costs more than it saves.  Budgets that take far longer than attention to
/// everything get its time, which a larger budget has: times must not fall with the budget, and
/// those of the budget that covers all count more there.
void cap_by_whole(std::vector<ProfileRow>& series, std::int64_t block, double limit,
                  std::vector<std::string>& notes) {
  if (series.front().part != ProfilePart::attention) return;
  std::map<std::pair<std::int64_t, std::int64_t>, double> whole;
  for (const ProfileRow& r : series)
    if (r.budget == covering_budget(r, block))
      whole[{r.query_tokens, r.prefix_tokens}] = r.median_s;
  std::size_t moved = 0;
  for (ProfileRow& r : series) {
    const auto found = whole.find({r.query_tokens, r.prefix_tokens});
    if (found == whole.end() || r.median_s <= found->second * (1 + limit)) continue;
    r.median_s = found->second;
    ++moved;
  }
  if (moved > 0)
    notes.push_back(fmt::format("{}: {} budgets took longer than attention to everything",
                                describe_series(series.front()), moved));
}

constexpr double kGrain_s = 2e-5;  // launches and clocks: no table is refused for less

/// Geometric mean of the largest time of smaller points and the smallest time of larger ones:
/// monotone in every direction.
void make_monotone(std::vector<ProfileRow>& series, double limit, std::vector<std::string>& notes) {
  const auto below = [](const ProfileRow& a, const ProfileRow& b) {
    return a.query_tokens <= b.query_tokens && a.prefix_tokens <= b.prefix_tokens &&
           a.budget <= b.budget;
  };
  std::vector<double> fixed;
  for (const ProfileRow& r : series) {
    double low = r.median_s, high = r.median_s;
    for (const ProfileRow& other : series) {
      if (below(other, r)) high = std::max(high, other.median_s);
      if (below(r, other)) low = std::min(low, other.median_s);
    }
    fixed.push_back(low == high ? r.median_s : std::sqrt(low * high));
  }
  std::size_t moved = 0;
  double most = 0;
  for (std::size_t i = 0; i < series.size(); ++i) {
    const double by = std::abs(fixed[i] / series[i].median_s - 1);
    require(by <= limit || std::abs(fixed[i] - series[i].median_s) <= kGrain_s,
            "profile table: {} took {:.4g} s, less than a smaller case or more than a larger one "
            "by far (monotone repair would move it by "
            "{:.0f} %, profile.repair_limit allows {:.0f} %); {} on an idle machine",
            describe(series[i]), series[i].median_s, 100 * by, 100 * limit, kRemedy);
    moved += by > 0;
    most = std::max(most, by);
    series[i].median_s = fixed[i];
  }
  if (moved > 0)
    notes.push_back(fmt::format("{}: {} times made monotone, moved by up to {:.1f} %",
                                describe_series(series.front()), moved, 100 * most));
}

}  // namespace

const char* name(ProfilePart part) {
  static const char* names[] = {"rest", "attention", "head"};
  return names[static_cast<int>(part)];
}

const char* name(ProfilePass pass) { return pass == ProfilePass::forward ? "forward" : "backward"; }

std::string describe(const ProfileRow& r) {
  return fmt::format("{}{}{}, {} tokens after {}, budget {}, sp {}, recompute {}, {}", name(r.part),
                     r.pattern ? " " : "", pattern_text(r), r.query_tokens, r.prefix_tokens,
                     r.budget, r.sp, name(r.recompute), name(r.pass));
}

const ProfileLink* ProfileTable::link(std::string_view level) const {
  const auto at = std::find_if(links.begin(), links.end(),
                               [&](const ProfileLink& l) { return l.level == level; });
  return at == links.end() ? nullptr : &*at;
}

ProfileTable checked(ProfileTable table, double limit, std::vector<std::string>& notes) {
  const std::int64_t block = table.block_tokens;
  require(block > 0, "profile table: block_tokens = {} must be above 0", block);
  for (const ProfileLink& l : table.links)
    require(l.latency_s >= 0 && l.bytes_per_s > 0 && std::isfinite(l.latency_s) &&
                std::isfinite(l.bytes_per_s),
            "profile table: link {} has latency {} s and bandwidth {} bytes/s; {}", l.level,
            l.latency_s, l.bytes_per_s, kRemedy);
  std::map<Series, std::vector<ProfileRow>> grids;
  std::map<Series, std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>>> stated;
  for (ProfileRow r : table.rows) {
    require(
        r.query_tokens > 0 && r.prefix_tokens >= 0 && r.budget >= 0 && r.sp >= 1 && r.bytes >= 0,
        "profile table: {} is out of range", describe(r));
    if (!(r.median_s > 0 && std::isfinite(r.median_s))) {
      notes.push_back(
          fmt::format("{}: no positive finite time; left out, to be interpolated", describe(r)));
      continue;
    }
    stated[series_of(r)].insert(point_of(r));
    if (r.part == ProfilePart::attention)
      r.budget =
          r.budget == 0 ? covering_budget(r, block) : std::min(r.budget, covering_budget(r, block));
    grids[series_of(r)].push_back(r);
  }
  require(!grids.empty(), "profile table: no row with a positive finite time; {}", kRemedy);
  table.rows.clear();
  for (auto& [key, series] : grids) {
    std::sort(series.begin(), series.end(),
              [](const ProfileRow& a, const ProfileRow& b) { return point_of(a) < point_of(b); });
    join_equal_points(series, stated[key]);
    check_holes(series, block, notes);
    cap_by_whole(series, block, limit, notes);
    make_monotone(series, limit, notes);
    Series other = key;
    std::get<ProfilePass>(other) = std::get<ProfilePass>(key) == ProfilePass::forward
                                       ? ProfilePass::backward
                                       : ProfilePass::forward;
    require(grids.count(other) > 0, "profile table: {} is there without {}; {}",
            describe_series(series.front()), name(std::get<ProfilePass>(other)), kRemedy);
    table.rows.insert(table.rows.end(), series.begin(), series.end());
  }
  return table;
}

}  // namespace ballast
