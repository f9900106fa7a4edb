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

Selection top_share(std::vector<MassItem> items, std::int64_t total, double share, std::int64_t cap,
                    std::int64_t given) {
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
  for (std::size_t i = kept; i < wanted; ++i)
    if (items[i].index >= given) {
      ++selection.overflow;
      selection.overflow_mass += items[i].mass;
    }
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

}  // namespace

HeadChoice choose_vertical_slash(const HeadMass& mass, const AttentionOptions& options) {
  HeadChoice choice;
  Selection slashes =
      top_share(slash_items(mass), mass.total, options.slash_share, options.max_slashes, 1);
  add_slashes(choice.head, slashes.chosen);
  Selection columns = top_share(mass.columns.at(0), mass.total, options.vertical_share,
                                options.max_columns, kBlock);
  choice.head.columns = std::move(columns.chosen);
  choice.overflow = slashes.overflow + columns.overflow;
  if (mass.total > 0)
    choice.overflow_mass =
        static_cast<double>(std::max(slashes.overflow_mass, columns.overflow_mass)) /
        static_cast<double>(mass.total);
  return choice;
}

}  // namespace ballast
