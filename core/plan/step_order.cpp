#include "core/plan/step_order.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/threads.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/shared_lanes.hpp"
#include "core/plan/step_problems.hpp"

namespace ballast {
namespace {

/// Data-parallel ranks that are scheduled together.
struct Part {
  std::vector<int> lanes;  ///< ascending
  bool alike = true;       ///< all of them hold the same micro-batches
};

/// Ranks linked by shared micro-batches; where gradients are reduced by round and lists differ
/// inside a part, or `as_one`, all ranks are one.
std::vector<Part> parts_of(const StepPlan& plan, bool as_one) {
  std::vector<int> root(plan.lanes.size());
  std::iota(root.begin(), root.end(), 0);
  const auto find = [&](int d) {
    while (root[static_cast<std::size_t>(d)] != d) d = root[static_cast<std::size_t>(d)];
    return d;
  };
  for (const PlannedMicroBatch& m : plan.micro_batches)
    for (int d = m.group.first + 1; d < m.group.first + m.group.ranks; ++d) {
      const int a = find(m.group.first), b = find(d);
      root[static_cast<std::size_t>(std::max(a, b))] = std::min(a, b);
    }
  const auto collect = [&] {
    std::map<int, Part> parts;
    for (int d = 0; d < static_cast<int>(root.size()); ++d) {
      Part& part = parts[find(d)];
      part.lanes.push_back(d);
      part.alike &= plan.lanes[static_cast<std::size_t>(d)].micro_batches ==
                    plan.lanes[static_cast<std::size_t>(part.lanes.front())].micro_batches;
    }
    std::vector<Part> result;
    for (auto& [first, part] : parts) result.push_back(std::move(part));
    return result;
  };
  std::vector<Part> parts = collect();
  if (as_one || (plan.reduces_by_round() &&
                 std::any_of(parts.begin(), parts.end(), [](const Part& p) { return !p.alike; }))) {
    std::fill(root.begin(), root.end(), 0);
    parts = collect();
  }
  return parts;
}

/// The schedule of a lane that waits for no other.
Schedule schedule_alone(const StepPlan& plan, int dp, const PipelineOptions& options,
                        const ScheduleCosts& costs) {
  const std::vector<MicroBatch> list = plan.list(dp);
  if (!plan.backward) return forward_schedule(chunk_groups(list), options.stages);
  const std::vector<int>& ids = plan.lanes[static_cast<std::size_t>(dp)].micro_batches;
  return plan_schedule(list, options, {[&](int stage, Op op) {
                         op.micro_batch = ids[static_cast<std::size_t>(op.micro_batch)];
                         return costs.duration(stage, op);
                       }});
}

/// Rounds of a lane's micro-batches in the order in which a stage ends their backwards (or
/// forwards, where there are no others).
std::vector<int*> rounds_of(StepPlan& plan, int dp, const std::vector<Op>& ops) {
  std::vector<int*> rounds;
  for (const Op& op : ops)
    if (completes_gradients(op.kind) || (!plan.backward && op.kind == OpKind::forward)) {
      const int id = plan.lanes[static_cast<std::size_t>(dp)]
                         .micro_batches[static_cast<std::size_t>(op.micro_batch)];
      rounds.push_back(&plan.micro_batches[static_cast<std::size_t>(id)].round);
    }
  return rounds;
}

/// Keeps rounds that ascend in the order of a lane's backwards, numbers them by it elsewhere.
void number_rounds(StepPlan& plan, int dp, const Schedule& schedule) {
  const std::vector<int*> rounds = rounds_of(plan, dp, schedule.stages.front());
  const auto descends = [](const int* a, const int* b) { return *a >= *b; };
  if (std::adjacent_find(rounds.begin(), rounds.end(), descends) == rounds.end()) return;
  for (std::size_t i = 0; i < rounds.size(); ++i) *rounds[i] = static_cast<int>(i);
}

/// Joins a round's collective as soon as no backward of it or an earlier round is left, and what
/// the last of them sends is on its way.
void join_rounds(StepPlan& plan, int dp, Schedule& schedule) {
  const int rounds = plan.rounds();
  for (std::vector<Op>& ops : schedule.stages) {
    const std::vector<int*> own = rounds_of(plan, dp, ops);
    std::vector<Op> joined;
    std::size_t ended = 0;
    int next = 0;
    const auto join = [&] {
      for (const int until = ended < own.size() ? *own[ended] : rounds; next < until; ++next)
        joined.push_back({OpKind::collective, next});
    };
    for (const Op& op : ops) {
      if (op.kind != OpKind::send) join();
      joined.push_back(op);
      if (completes_gradients(op.kind)) ++ended;
    }
    join();
    ops = std::move(joined);
  }
}

/// Schedules stored once each.
class Distinct {
 public:
  explicit Distinct(std::vector<Schedule>& schedules) : schedules_(schedules) {}
  int place(Schedule schedule) {
    auto& same = places_[schedule.hash()];
    for (const int at : same)
      if (schedules_[static_cast<std::size_t>(at)].stages == schedule.stages) return at;
    same.push_back(static_cast<int>(schedules_.size()));
    schedules_.push_back(std::move(schedule));
    return same.back();
  }

 private:
  std::vector<Schedule>& schedules_;
  std::map<std::uint64_t, std::vector<int>> places_;
};

/// Calls work(0) .. work(count - 1) on the machine's cores.
void spread(std::size_t count, const std::function<void(std::size_t)>& work) {
  const std::size_t threads =
      std::min<std::size_t>(count, std::max(1u, std::thread::hardware_concurrency()));
  in_threads(threads, [&](std::size_t t) {
    for (std::size_t i = t; i < count; i += threads) work(i);
  });
}

/// Orders that all searches of one step may try together.
constexpr int kMostOrders = 4096;

/// Schedules of every part: one for all its lanes where they are alike, else one a lane.
std::vector<std::vector<Schedule>> build(StepPlan& plan, const std::vector<Part>& parts,
                                         PipelineOptions options, const ScheduleCosts& costs) {
  options.search =
      std::max(1, std::min(options.search, kMostOrders / static_cast<int>(parts.size())));
  std::vector<std::vector<Schedule>> built(parts.size());
  const auto one = [&](std::size_t p) {
    if (parts[p].alike)
      built[p] = {schedule_alone(plan, parts[p].lanes.front(), options, costs)};
    else if (!plan.backward)  // one direction in one order never waits in a circle
      for (const int d : parts[p].lanes)
        built[p].push_back(schedule_alone(plan, d, options, costs));
    else
      built[p] = schedule_shared(plan, parts[p].lanes, options, costs);
  };
  if (plan.backward && state_aware(options.schedule)) {
    spread(parts.size(), one);
    return built;
  }
  std::map<ChunkGroups, Schedule> known;  // costs do not change these schedules
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (!parts[p].alike) {
      one(p);
      continue;
    }
    ChunkGroups groups = chunk_groups(plan.list(parts[p].lanes.front()));
    if (const auto at = known.find(groups); at != known.end()) {
      built[p] = {at->second};
    } else {
      one(p);
      known.emplace(std::move(groups), built[p].front());
    }
  }
  return built;
}

/// Orders the parts, each by itself.
void order_parts(StepPlan& plan, const std::vector<Part>& parts, const PipelineOptions& options,
                 const ScheduleCosts& costs) {
  std::vector<std::vector<Schedule>> built = build(plan, parts, options, costs);
  for (std::size_t p = 0; p < parts.size(); ++p)
    if (parts[p].alike) number_rounds(plan, parts[p].lanes.front(), built[p].front());
  plan.schedules.clear();
  Distinct distinct(plan.schedules);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    if (parts[p].alike && plan.reduces_by_round())
      join_rounds(plan, parts[p].lanes.front(), built[p].front());
    int place = -1;
    for (std::size_t i = 0; i < parts[p].lanes.size(); ++i) {
      if (i < built[p].size()) place = distinct.place(std::move(built[p][i]));
      plan.lanes[static_cast<std::size_t>(parts[p].lanes[i])].schedule = place;
    }
  }
}

}  // namespace

void order_step(StepPlan& plan, const PipelineOptions& options, const ScheduleCosts& costs) {
  for (const PlannedLane& lane : plan.lanes)
    require(std::is_sorted(lane.micro_batches.begin(), lane.micro_batches.end()),
            "the ids of a lane's micro-batches must ascend");
  const std::vector<Part> parts = parts_of(plan, false);
  // Halves of a backward end in another order from stage to stage, and forwards that keep nothing
  // run as far ahead as transfers may, so lists made apart could wait for one another's collectives
  // in a circle.
  const bool checks = plan.reduces_by_round() && parts.size() > 1 && options.stages > 1 &&
                      state_aware(options.schedule);
  if (!checks) return order_parts(plan, parts, options, costs);
  const StepPlan before = plan;
  order_parts(plan, parts, options, costs);
  if (problems(plan).empty()) return;
  plan = before;
  order_parts(plan, parts_of(plan, true), options, costs);
}

}  // namespace ballast
