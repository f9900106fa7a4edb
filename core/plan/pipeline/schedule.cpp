#include "core/plan/pipeline/schedule.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "core/base/error.hpp"
#include "core/base/hash.hpp"

namespace ballast {

const char* name(OpKind kind) {
  static const char* names[] = {"forward",         "recompute", "backward", "backward_input",
                                "backward_weight", "send",      "recv",     "offload",
                                "fetch",           "collective"};
  return names[static_cast<int>(kind)];
}

std::vector<char> ends_gradients(const std::vector<Op>& ops) {
  std::vector<char> ends(ops.size(), 0);
  bool next = true, after_sends = true;  // whether the reduction follows, at once or after sends
  for (std::size_t i = ops.size(); i-- > 0;) {
    const OpKind kind = ops[i].kind;
    ends[i] =
        (kind == OpKind::backward && after_sends) || (kind == OpKind::backward_weight && next);
    next = kind == OpKind::collective;
    after_sends = next || (after_sends && kind == OpKind::send);
  }
  return ends;
}

std::uint64_t Schedule::hash() const {
  Hash h;
  for (const auto& ops : stages) {
    h.add(ops.size());
    for (const auto& op : ops)
      h.add(op.kind).add(op.micro_batch).add(op.chunk).add(op.peer).add(op.payload);
  }
  return h.value();
}

namespace {

std::string describe(int stage, const Op& op) {
  return fmt::format("stage {} {} of micro-batch {}{}", stage, name(op.kind), op.micro_batch,
                     op.peer < 0 ? std::string()
                                 : fmt::format(" ({} stage {})",
                                               op.kind == OpKind::send ? "to" : "from", op.peer));
}

/// from stage, to stage, micro-batch, payload: what a send and its receive share.
using Wire = std::tuple<int, int, int, Payload>;
Wire wire(int stage, const Op& op) {
  return op.kind == OpKind::send ? Wire{stage, op.peer, op.micro_batch, op.payload}
                                 : Wire{op.peer, stage, op.micro_batch, op.payload};
}

bool is_useful(OpKind kind) {
  return kind == OpKind::forward || kind == OpKind::backward || kind == OpKind::backward_input ||
         kind == OpKind::backward_weight;
}

/// [stage] the micro-batches that are recomputed there; their forwards keep nothing.
std::vector<std::set<int>> recomputed_on(const Schedule& schedule) {
  std::vector<std::set<int>> list(schedule.stages.size());
  for (std::size_t s = 0; s < list.size(); ++s)
    for (const Op& op : schedule.stages[s])
      if (op.kind == OpKind::recompute) list[s].insert(op.micro_batch);
  return list;
}

/// Error that names the op at which each stage stands, if one has not come to its end.
void require_all_done(const Schedule& schedule, const std::vector<std::size_t>& next) {
  std::string blocked;
  for (std::size_t s = 0; s < next.size(); ++s)
    if (next[s] < schedule.stages[s].size())
      blocked += "\n  " + describe(static_cast<int>(s), schedule.stages[s][next[s]]);
  require(blocked.empty(),
          "the schedule deadlocks; these ops wait for transfers that are never sent:{}", blocked);
}

}  // namespace

SimulatedSchedule simulate(const Schedule& schedule, const ScheduleCosts& costs) {
  const int stages = static_cast<int>(schedule.stages.size());
  SimulatedSchedule result;
  result.stages.resize(stages);
  result.peak_live_activations.assign(stages, 0);
  result.peak_weight_halves.assign(stages, 0);
  std::vector<int> halves(stages, 0);
  std::vector<std::size_t> next(stages, 0);
  std::vector<double> clock(stages, 0);
  std::vector<std::set<int>> live(stages);
  std::map<Wire, double> arrival;
  const std::vector<std::set<int>> recomputed = recomputed_on(schedule);
  double useful = 0;
  for (bool progress = true; progress;) {
    progress = false;
    for (int s = 0; s < stages; ++s) {
      for (; next[s] < schedule.stages[s].size(); ++next[s]) {
        const Op& op = schedule.stages[s][next[s]];
        double begin = clock[s], end = begin;
        if (op.kind == OpKind::send) {
          arrival[wire(s, op)] =
              begin + costs.duration(s, op);  // posted: the sender goes on at once
        } else if (op.kind == OpKind::recv) {
          const auto sent = arrival.find(wire(s, op));
          if (sent == arrival.end()) break;
          end = std::max(begin, sent->second);
        } else {
          const double duration = costs.duration(s, op);
          end = begin + duration;
          if (is_useful(op.kind)) useful += duration;
          const bool kept =
              op.kind == OpKind::recompute ||
              (op.kind == OpKind::forward && recomputed[s].count(op.micro_batch) == 0);
          if (kept) live[s].insert(op.micro_batch);
          result.peak_live_activations[s] =
              std::max(result.peak_live_activations[s], static_cast<int>(live[s].size()));
          if (op.kind == OpKind::backward || op.kind == OpKind::backward_weight)
            live[s].erase(op.micro_batch);
          halves[s] += op.kind == OpKind::backward_input    ? 1
                       : op.kind == OpKind::backward_weight ? -1
                                                            : 0;
          result.peak_weight_halves[s] = std::max(result.peak_weight_halves[s], halves[s]);
        }
        result.stages[s].push_back({op, begin, end});
        clock[s] = end;
        result.step_time_s = std::max(result.step_time_s, end);
        progress = true;
      }
    }
  }
  require_all_done(schedule, next);
  result.bubble_ratio = result.step_time_s > 0 ? 1 - useful / (stages * result.step_time_s) : 0;
  return result;
}

std::string problems(const Schedule& schedule) {
  const int stages = static_cast<int>(schedule.stages.size());
  std::map<Wire, int> balance;  // sends minus receives
  for (int s = 0; s < stages; ++s) {
    std::map<int, int> forwards, backwards, whole;  // whole: ended by a backward or its weight half
    // What a send carries is computed before it, what a receive brings is used after it.
    const auto computed = [&](const Op& op) {
      return (op.payload == Payload::activation ? forwards : backwards)[op.micro_batch] > 0;
    };
    for (const Op& op : schedule.stages[s]) {
      switch (op.kind) {
        case OpKind::send:
        case OpKind::recv:
          if (op.peer < 0 || op.peer >= stages || op.peer == s)
            return describe(s, op) + ": no such peer";
          if (computed(op) != (op.kind == OpKind::send))
            return describe(s, op) + (computed(op) ? ": comes too late" : ": not yet computed");
          balance[wire(s, op)] += op.kind == OpKind::send ? 1 : -1;
          break;
        case OpKind::recompute:
          if (forwards[op.micro_batch] == 0) return describe(s, op) + ": before its forward";
          break;
        case OpKind::forward:
          ++forwards[op.micro_batch];
          break;
        case OpKind::backward:
        case OpKind::backward_input:
          if (forwards[op.micro_batch] == 0) return describe(s, op) + ": before its forward";
          if (++backwards[op.micro_batch] > 1) return describe(s, op) + ": twice";
          if (op.kind == OpKind::backward) ++whole[op.micro_batch];
          break;
        case OpKind::backward_weight:
          if (backwards[op.micro_batch] == 0)
            return describe(s, op) + ": before its backward_input";
          if (++whole[op.micro_batch] > 1) return describe(s, op) + ": twice";
          break;
        case OpKind::offload:
        case OpKind::fetch:
        case OpKind::collective:
          break;
      }
    }
    for (const auto& [micro_batch, count] : forwards)
      if (whole[micro_batch] == 0)
        return fmt::format("stage {}: micro-batch {} has no backward", s, micro_batch);
  }
  for (const auto& [key, count] : balance)
    if (count != 0)
      return fmt::format("stage {} -> {}, micro-batch {}: a {} without its counterpart",
                         std::get<0>(key), std::get<1>(key), std::get<2>(key),
                         count > 0 ? "send" : "recv");
  return "";
}

}  // namespace ballast
