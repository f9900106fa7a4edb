#include "core/predict/lane_clock.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/base/error.hpp"

namespace ballast {
namespace {

bool is_useful(OpKind kind) {
  return kind == OpKind::forward || kind == OpKind::backward || kind == OpKind::backward_input ||
         kind == OpKind::backward_weight;
}

/// Who has come to a place where several lanes begin together.
struct Meeting {
  int arrived = 0;
  double latest_s = 0;
  std::vector<int> waiting;
};

/// Lanes that depend on one another, run to their ends.
class Lanes {
 public:
  Lanes(const LaneClockInputs& in, std::vector<int> lanes)
      : in_(in), lanes_(std::move(lanes)), stages_(in.plan.mesh.pp) {
    for (const int dp : lanes_) {
      const PlannedLane& lane = in.plan.lanes[static_cast<std::size_t>(dp)];
      const Schedule& schedule = in.plan.schedule(dp);
      for (int s = 0; s < stages_; ++s) {
        Cursor& c = cursors_.emplace_back();
        c.dp = dp, c.stage = s;
        c.ops = &schedule.stages.at(static_cast<std::size_t>(s));
        const std::size_t n = lane.micro_batches.size();
        c.activation_s.assign(n, -1);
        c.gradient_s.assign(n, -1);
        c.fetched_s.assign(n, 0);
        c.recomputed.assign(n, 0);
        c.live.assign(n, 0);
        for (const Op& op : *c.ops)
          if (op.kind == OpKind::recompute)
            c.recomputed[static_cast<std::size_t>(op.micro_batch)] = 1;
        queue_.push_back(static_cast<int>(cursors_.size()) - 1);
      }
    }
    queued_.assign(cursors_.size(), 1);
  }

  /// Results by lane of the constructor's list and stage.
  std::vector<std::vector<LaneStage>> run() {
    while (!queue_.empty()) {
      const int at = queue_.front();
      queue_.pop_front();
      queued_[static_cast<std::size_t>(at)] = 0;
      while (advance(at)) {
      }
    }
    check();
    std::vector<std::vector<LaneStage>> results(lanes_.size());
    for (std::size_t c = 0; c < cursors_.size(); ++c) {
      cursors_[c].result.end_s = cursors_[c].clock_s;
      results[c / static_cast<std::size_t>(stages_)].push_back(std::move(cursors_[c].result));
    }
    return results;
  }

 private:
  struct Cursor {
    int dp = 0, stage = 0;
    const std::vector<Op>* ops = nullptr;
    std::size_t next = 0;
    double clock_s = 0, to_host_s = 0, to_device_s = 0;
    bool waits = false;  ///< has come to a meeting that others have not
    int live_now = 0, halves_now = 0;
    std::vector<double> activation_s, gradient_s, fetched_s;  ///< by place: when it is there
    std::vector<char> recomputed, live;
    LaneStage result;
    bool done() const { return next == ops->size(); }
  };

  Cursor& cursor(int lane_of, int stage) {
    return cursors_[static_cast<std::size_t>((lane_of / stages_) * stages_ + stage)];
  }
  void wake(int at) {
    if (std::exchange(queued_[static_cast<std::size_t>(at)], 1) == 0) queue_.push_back(at);
  }
  int id(const Cursor& c, const Op& op) const {
    return in_.plan.lanes[static_cast<std::size_t>(c.dp)]
        .micro_batches[static_cast<std::size_t>(op.micro_batch)];
  }

  /// Whether all `members` have come; until then the cursor waits.  Sets its clock to the latest.
  bool meet(Meeting& meeting, int members, int at) {
    Cursor& c = cursors_[static_cast<std::size_t>(at)];
    if (!c.waits) {
      ++meeting.arrived;
      meeting.latest_s = std::max(meeting.latest_s, c.clock_s);
      c.waits = true;
      if (meeting.arrived == members)
        for (const int other : meeting.waiting) wake(other);
      else
        meeting.waiting.push_back(at);
    }
    if (meeting.arrived < members) return false;
    c.waits = false;
    c.clock_s = meeting.latest_s;
    return true;
  }

  bool advance(int at) {
    Cursor& c = cursors_[static_cast<std::size_t>(at)];
    if (c.done()) return false;
    const Op& op = (*c.ops)[c.next];
    if (op.kind == OpKind::collective) return join_round(c, op.micro_batch, at);
    const auto place = static_cast<std::size_t>(op.micro_batch);
    const MicroBatchTimes& times = *in_.times[static_cast<std::size_t>(id(c, op))];
    double begin_s = c.clock_s, end_s = begin_s;
    if (op.kind == OpKind::recv) {
      end_s = (op.payload == Payload::activation ? c.activation_s : c.gradient_s)[place];
      if (end_s < 0) return false;
      c.clock_s = end_s = std::max(begin_s, end_s);
    } else if (op.kind == OpKind::send) {
      Cursor& peer = cursor(at, op.peer);
      (op.payload == Payload::activation ? peer.activation_s : peer.gradient_s)[place] =
          begin_s + times.stage_hop_s(c.stage, op.peer);  // posted: the sender goes on at once
      wake(static_cast<int>(&peer - cursors_.data()));
    } else if (op.kind == OpKind::offload || op.kind == OpKind::fetch) {
      double& engine_s = op.kind == OpKind::offload ? c.to_host_s : c.to_device_s;
      begin_s = std::max(begin_s, engine_s);
      engine_s = end_s = begin_s + times.host_copy_s;  // beside the computation that follows
      if (op.kind == OpKind::fetch) c.fetched_s[place] = end_s;
    } else {
      const PlannedMicroBatch& m = in_.plan.micro_batches[static_cast<std::size_t>(id(c, op))];
      if (m.group.ranks > 1 && !meet(shared_[{id(c, op), c.stage, op.kind}], m.group.ranks, at))
        return false;
      begin_s = op.kind == OpKind::recompute ? std::max(c.clock_s, c.fetched_s[place]) : c.clock_s;
      c.clock_s = end_s = begin_s + compute(c, op, times);
      if (c.result.last_s == 0) c.result.first_s = begin_s;
      c.result.last_s = end_s;
    }
    if (in_.keep_ops) c.result.ops.push_back({op, begin_s, end_s});
    ++c.next;
    return true;
  }

  bool join_round(Cursor& c, int round, int at) {
    if (!meet(rounds_[{c.stage, round}], static_cast<int>(lanes_.size()), at)) return false;
    const double s =
        in_.round_s.at(static_cast<std::size_t>(c.stage)).at(static_cast<std::size_t>(round));
    c.clock_s += s;
    c.result.round_s += s;
    ++c.next;
    return true;
  }

  /// Seconds of a computation; keeps count of what it spends and holds.
  double compute(Cursor& c, const Op& op, const MicroBatchTimes& times) {
    const auto s = static_cast<std::size_t>(c.stage),
               place = static_cast<std::size_t>(op.micro_batch);
    const bool forward = op.kind == OpKind::forward || op.kind == OpKind::recompute;
    PassParts parts = forward ? times.forward[s] : times.backward[s];
    // The first forward of a chunk that runs again leaves the head to the second.
    if (op.kind == OpKind::forward && c.recomputed[place] && c.stage + 1 == stages_)
      parts.compute_s -= times.head_s;
    if (op.kind == OpKind::backward_input) parts.compute_s -= times.weight_s[s];
    if (op.kind == OpKind::backward_weight) parts = {times.weight_s[s], 0, 0, 0};
    const double seconds = parts.total_s();
    if (is_useful(op.kind))
      c.result.useful_s += parts.compute_s + parts.recompute_s;
    else
      parts.recompute_s += std::exchange(parts.compute_s, 0);
    c.result.parts.add(parts);

    const bool kept =
        op.kind == OpKind::recompute || (op.kind == OpKind::forward && !c.recomputed[place]);
    if (kept && std::exchange(c.live[place], 1) == 0) ++c.live_now;
    c.result.live = std::max(c.result.live, c.live_now);
    if (completes_gradients(op.kind) && std::exchange(c.live[place], 0) == 1) --c.live_now;
    c.halves_now += op.kind == OpKind::backward_input    ? 1
                    : op.kind == OpKind::backward_weight ? -1
                                                         : 0;
    c.result.weight_halves = std::max(c.result.weight_halves, c.halves_now);
    return seconds;
  }

  void check() const {
    std::string blocked;
    int named = 0;
    for (const Cursor& c : cursors_) {
      if (c.done()) continue;
      if (++named > 8) break;
      const Op& op = (*c.ops)[c.next];
      if (op.kind == OpKind::collective) {
        blocked += fmt::format("\n  lane {} stage {}: collective of round {}", c.dp, c.stage,
                               op.micro_batch);
        continue;
      }
      blocked += fmt::format("\n  lane {} stage {}: {} of micro-batch {}", c.dp, c.stage,
                             name(op.kind), id(c, op));
    }
    require(blocked.empty(), "the plan deadlocks; these operations wait for one another:{}",
            blocked);
  }

  const LaneClockInputs& in_;
  std::vector<int> lanes_;
  int stages_;
  std::vector<Cursor> cursors_;  ///< [lane][stage]
  std::deque<int> queue_;
  std::vector<char> queued_;
  std::map<std::tuple<int, int, OpKind>, Meeting> shared_;
  std::map<std::pair<int, int>, Meeting> rounds_;
};

/// Lanes that share micro-batches, each list ascending.
std::vector<std::vector<int>> components(const StepPlan& plan, bool all) {
  const auto dp = static_cast<int>(plan.lanes.size());
  std::vector<int> parent(plan.lanes.size());
  std::iota(parent.begin(), parent.end(), 0);
  const auto root = [&](int d) {
    while (parent[static_cast<std::size_t>(d)] != d) d = parent[static_cast<std::size_t>(d)];
    return d;
  };
  for (const PlannedMicroBatch& m : plan.micro_batches)
    for (int d = m.group.first; d < m.group.first + m.group.ranks; ++d)
      parent[static_cast<std::size_t>(root(d))] = root(m.group.first);
  for (int d = 1; all && d < dp; ++d) parent[static_cast<std::size_t>(root(d))] = root(0);
  std::map<int, std::vector<int>> sets;
  for (int d = 0; d < dp; ++d) sets[root(d)].push_back(d);
  std::vector<std::vector<int>> list;
  for (auto& [first, lanes] : sets) list.push_back(std::move(lanes));
  return list;
}

}  // namespace

std::vector<std::vector<LaneStage>> run_lanes(const LaneClockInputs& inputs) {
  const StepPlan& plan = inputs.plan;
  std::vector<std::vector<LaneStage>> results(plan.lanes.size());
  std::map<std::pair<int, std::vector<const MicroBatchTimes*>>, int> known;
  for (const std::vector<int>& lanes : components(plan, plan.reduces_by_round())) {
    if (lanes.size() == 1) {
      const int dp = lanes.front();
      const PlannedLane& lane = plan.lanes[static_cast<std::size_t>(dp)];
      std::vector<const MicroBatchTimes*> list;
      for (const int id : lane.micro_batches)
        list.push_back(inputs.times[static_cast<std::size_t>(id)].get());
      const auto [at, fresh] = known.try_emplace({lane.schedule, std::move(list)}, dp);
      if (!fresh) {
        results[static_cast<std::size_t>(dp)] = results[static_cast<std::size_t>(at->second)];
        continue;
      }
    }
    auto done = Lanes(inputs, lanes).run();
    for (std::size_t l = 0; l < lanes.size(); ++l)
      results[static_cast<std::size_t>(lanes[l])] = std::move(done[l]);
  }
  return results;
}

}  // namespace ballast
