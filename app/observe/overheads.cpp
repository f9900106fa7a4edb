#include "app/observe/overheads.hpp"

namespace ballast {

void Overheads::add(const OverheadSeconds& most, double step_s) {
  tuning_.add(most.tuning_s, step_s);
  planning_.add(most.planning_s, step_s);
  added_ = true;
}

std::vector<std::pair<std::string, double>> Overheads::shares() const {
  std::vector<std::pair<std::string, double>> list;
  if (added_ && dst_) list.emplace_back("dst_overhead_share", tuning_.share());
  if (added_ && sab_) list.emplace_back("sab_overhead_share", planning_.share());
  return list;
}

OverheadSeconds overhead_seconds(std::span<const Event> events, std::int64_t step) {
  return {kind_seconds(events, EventKind::tuning, step),
          kind_seconds(events, EventKind::planning, step)};
}

}  // namespace ballast
