#include "core/plan/attention/pattern_selection.hpp"

#include <algorithm>

#include "core/base/error.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {

bool heavier(const MassItem& a, const MassItem& b) {
  return a.mass != b.mass ? a.mass > b.mass : a.index < b.index;
}

}  // namespace

std::vector<MassItem> heaviest(std::vector<MassItem> items, std::int64_t count) {
  if (count < static_cast<std::int64_t>(items.size())) {
    std::nth_element(items.begin(), items.begin() + count, items.end(), heavier);
    items.resize(static_cast<std::size_t>(count));
  }
  std::sort(items.begin(), items.end(), heavier);
  return items;
}

Selection top_share(std::vector<MassItem> items, std::int64_t total, double share,
                    std::int64_t cap) {
  require(share > 0 && share <= 1, "a share of the attention mass must lie in (0, 1], not {}",
          share);
  std::sort(items.begin(), items.end(), heavier);
  std::size_t wanted = items.size();
  if (share < 1) {
    const double target = share * static_cast<double>(total);
    std::int64_t sum = 0;
    wanted = 0;
    while (wanted < items.size() && (wanted == 0 || static_cast<double>(sum) < target))
      sum += items[wanted++].mass;
  }
  Selection selection;
  const std::size_t kept = cap > 0 ? std::min(wanted, static_cast<std::size_t>(cap)) : wanted;
  selection.overflow = static_cast<std::int64_t>(wanted - kept);
  for (std::size_t i = 0; i < kept; ++i) selection.chosen.push_back(items[i].index);
  std::sort(selection.chosen.begin(), selection.chosen.end());
  return selection;
}

namespace {

std::vector<MassItem> slash_items(const HeadMass& mass) {
  std::vector<MassItem> items(mass.slashes.size());
  for (std::size_t d = 0; d < items.size(); ++d)
    items[d] = {static_cast<std::int64_t>(d), mass.slashes[d]};
  return items;
}

void add_slashes(VerticalSlash& head, const std::vector<std::int64_t>& chosen) {
  if (chosen.empty() || chosen.front() != 0) head.slashes.push_back(0);
  for (std::int64_t d : chosen) head.slashes.push_back(static_cast<std::int32_t>(d));
}

/// Columns that a budget may buy, heaviest first.
std::vector<MassItem> kept_columns(const HeadMass& mass, const AttentionOptions& options) {
  return heaviest(mass.columns, options.max_columns > 0
                                    ? options.max_columns
                                    : static_cast<std::int64_t>(mass.columns.size()));
}

/// What one unit of budget, 64 keys a query row, buys: a slash, or 64 columns.  Heaviest first,
/// slashes before columns of equal mass.
struct Unit {
  std::int64_t mass = 0;
  bool slash = true;
  std::int64_t number = 0;  ///< slash, or group of 64 of the columns in order of mass
};
std::vector<Unit> units_of(const HeadMass& mass, const std::vector<MassItem>& columns) {
  std::vector<Unit> units;
  for (std::size_t d = 0; d < mass.slashes.size(); ++d)
    units.push_back({mass.slashes[d], true, static_cast<std::int64_t>(d)});
  for (std::size_t first = 0; first < columns.size(); first += kBlock) {
    Unit group{0, false, static_cast<std::int64_t>(first / kBlock)};
    for (std::size_t i = first; i < std::min<std::size_t>(columns.size(), first + kBlock); ++i)
      group.mass += columns[i].mass;
    units.push_back(group);
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.mass > b.mass; });
  return units;
}

}  // namespace

HeadChoice choose_vertical_slash(const HeadMass& mass, const AttentionOptions& options) {
  HeadChoice choice;
  Selection slashes =
      top_share(slash_items(mass), mass.total, options.slash_share, options.max_slashes);
  add_slashes(choice.head, slashes.chosen);
  Selection columns =
      top_share(mass.columns, mass.total, options.vertical_share, options.max_columns);
  choice.head.columns = std::move(columns.chosen);
  choice.overflow = slashes.overflow + columns.overflow;
  return choice;
}

HeadChoice choose_vertical_slash(const HeadMass& mass, std::int64_t budget,
                                 const AttentionOptions& options) {
  const std::vector<MassItem> columns = kept_columns(mass, options);
  const std::vector<Unit> units = units_of(mass, columns);
  HeadChoice choice;
  std::vector<std::int64_t> slashes;
  for (std::size_t u = 0;
       u < std::min(units.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, budget)));
       ++u) {
    if (units[u].slash) {
      slashes.push_back(units[u].number);
      continue;
    }
    const std::size_t first = static_cast<std::size_t>(units[u].number) * kBlock;
    for (std::size_t i = first; i < std::min<std::size_t>(columns.size(), first + kBlock); ++i)
      choice.head.columns.push_back(columns[i].index);
  }
  std::sort(slashes.begin(), slashes.end());
  std::sort(choice.head.columns.begin(), choice.head.columns.end());
  add_slashes(choice.head, slashes);
  return choice;
}

std::vector<std::int64_t> vertical_slash_coverage(const HeadMass& mass,
                                                  const std::vector<std::int64_t>& budgets,
                                                  const AttentionOptions& options) {
  const std::vector<Unit> units = units_of(mass, kept_columns(mass, options));
  std::vector<std::int64_t> coverage;
  std::int64_t sum = 0;
  std::size_t taken = 0;
  for (std::int64_t budget : budgets) {
    for (; taken < units.size() && static_cast<std::int64_t>(taken) < budget; ++taken)
      sum += units[taken].mass;
    const double share =
        mass.total > 0 ? std::min(1.0, static_cast<double>(sum) / static_cast<double>(mass.total))
                       : 1.0;
    coverage.push_back(std::llrint(share * kCoverageUnit));
  }
  return coverage;
}

}  // namespace ballast
