#include "core/plan/step_problems.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>

#include "core/base/error.hpp"
#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {
namespace {

template <class T>
bool outside(int place, const std::vector<T>& list) {
  return place < 0 || place >= static_cast<int>(list.size());
}

std::string sizes(const StepPlan& plan) {
  const MeshShape& mesh = plan.mesh;
  if (const auto wrong = problems(mesh, 0); !wrong.empty()) return wrong.front();
  if (static_cast<int>(plan.lanes.size()) != mesh.dp)
    return fmt::format("{} lanes for mesh.dp = {}", plan.lanes.size(), mesh.dp);
  if (static_cast<int>(plan.layer_begin.size()) != mesh.pp)
    return fmt::format("first layers of {} stages for mesh.pp = {}", plan.layer_begin.size(),
                       mesh.pp);
  for (const PlannedCollective& c : plan.collectives) {
    if (c.stage < 0 || c.stage >= mesh.pp)
      return fmt::format("a {} on stage {} of {}", name(c.kind), c.stage, mesh.pp);
    if (c.after_round < -1 || c.after_round >= plan.rounds())
      return fmt::format("a {} after round {} of {}", name(c.kind), c.after_round, plan.rounds());
  }
  return "";
}

std::string values(const StepPlan& plan, int id) {
  const MeshShape& mesh = plan.mesh;
  const PlannedMicroBatch& m = plan.micro_batches[static_cast<std::size_t>(id)];
  const auto wrong = [&](const std::string& text) {
    return fmt::format("micro-batch {}: {}", id, text);
  };
  if (m.segments.empty()) return wrong("it has no segments");
  for (const Segment& s : m.segments)
    if (s.begin < 0 || s.end < s.begin)
      return wrong(fmt::format("tokens [{}, {}) of sample {}", s.begin, s.end, s.sample));
  if (m.group.ranks < 1 || m.group.first < 0 || m.group.first + m.group.ranks > mesh.dp)
    return wrong(fmt::format("ranks [{}, {}) of mesh.dp = {}", m.group.first,
                             m.group.first + m.group.ranks, mesh.dp));
  if (m.split.sp < 1 || m.split.ring_outer < 1 || m.split.ring_inner < 1 ||
      m.split.ranks() != m.group.ranks * mesh.cp() * mesh.sp)
    return wrong(fmt::format("a split of sp {} x ring {} x {} over {} ranks", m.split.sp,
                             m.split.ring_outer, m.split.ring_inner,
                             m.group.ranks * mesh.cp() * mesh.sp));
  if (outside(m.layout, plan.layouts)) return wrong(fmt::format("layout {} is none", m.layout));
  if (m.round < 0) return wrong(fmt::format("round {}", m.round));
  if (m.align < 1) return wrong(fmt::format("pieces aligned to {}", m.align));
  return "";
}

/// Which data-parallel ranks hold each micro-batch.
std::string placement(const StepPlan& plan) {
  std::vector<int> held(plan.micro_batches.size(), 0);
  for (int d = 0; d < plan.mesh.dp; ++d) {
    const PlannedLane& lane = plan.lanes[static_cast<std::size_t>(d)];
    if (outside(lane.schedule, plan.schedules))
      return fmt::format("data-parallel rank {}: schedule {} is none", d, lane.schedule);
    std::set<int> own;
    for (const int id : lane.micro_batches) {
      if (outside(id, plan.micro_batches))
        return fmt::format("data-parallel rank {}: micro-batch {} is none", d, id);
      if (!own.insert(id).second)
        return fmt::format("data-parallel rank {}: micro-batch {} stands twice", d, id);
      if (!plan.micro_batches[static_cast<std::size_t>(id)].group.holds(d))
        return fmt::format("data-parallel rank {}: micro-batch {} is not of its group", d, id);
      ++held[static_cast<std::size_t>(id)];
    }
  }
  std::map<std::int64_t, RankGroup> chunked;
  for (std::size_t id = 0; id < held.size(); ++id) {
    const PlannedMicroBatch& m = plan.micro_batches[id];
    if (held[id] != m.group.ranks)
      return fmt::format("micro-batch {}: {} of the {} ranks of its group hold it", id, held[id],
                         m.group.ranks);
    if (m.segments.size() != 1) continue;
    const auto [at, first] = chunked.emplace(m.segments[0].sample, m.group);
    if (!first && !(at->second == m.group))
      return fmt::format("chunks of sample {} lie on different groups", m.segments[0].sample);
  }
  return "";
}

/// Whether a schedule computes each of `count` micro-batches once on every stage.
std::string coverage(const Schedule& schedule, int stages, int count, bool backward) {
  if (static_cast<int>(schedule.stages.size()) != stages)
    return fmt::format("{} stages for mesh.pp = {}", schedule.stages.size(), stages);
  for (int s = 0; s < stages; ++s) {
    std::vector<int> forwards(static_cast<std::size_t>(count), 0);
    for (const Op& op : schedule.stages[static_cast<std::size_t>(s)]) {
      if (outside(op.micro_batch, forwards))
        return fmt::format("stage {}: {} of micro-batch {} of {}", s, name(op.kind), op.micro_batch,
                           count);
      if (op.kind == OpKind::forward) ++forwards[static_cast<std::size_t>(op.micro_batch)];
      if (!backward && computes(op.kind) && op.kind != OpKind::forward)
        return fmt::format("stage {}: a {} in a plan of forwards", s, name(op.kind));
    }
    for (int m = 0; m < count; ++m)
      if (forwards[static_cast<std::size_t>(m)] != 1)
        return fmt::format("stage {}: {} forwards of micro-batch {}", s,
                           forwards[static_cast<std::size_t>(m)], m);
  }
  return backward ? problems(schedule) : "";
}

std::string schedules(const StepPlan& plan) {
  std::set<std::pair<int, std::size_t>> seen;
  for (int d = 0; d < plan.mesh.dp; ++d) {
    const PlannedLane& lane = plan.lanes[static_cast<std::size_t>(d)];
    if (!seen.insert({lane.schedule, lane.micro_batches.size()}).second) continue;
    if (const std::string wrong =
            coverage(plan.schedule(d), plan.mesh.pp, static_cast<int>(lane.micro_batches.size()),
                     plan.backward);
        !wrong.empty())
      return fmt::format("schedule {} of data-parallel rank {}: {}", lane.schedule, d, wrong);
  }
  return "";
}

/// All lanes at once; see the header.
class Replay {
 public:
  explicit Replay(const StepPlan& plan)
      : plan_(plan),
        stages_(plan.mesh.pp),
        at_(plan.lanes.size() * static_cast<std::size_t>(stages_)),
        met_(plan.micro_batches.size() * static_cast<std::size_t>(stages_) * kKinds, 0),
        waiting_(static_cast<std::size_t>(stages_)) {
    std::size_t places = 0;
    for (const PlannedLane& lane : plan.lanes) {
      first_.push_back(places);
      places += lane.micro_batches.size();
    }
    sent_.assign(places * static_cast<std::size_t>(stages_) * 2, false);
    for (int s = 0; s < stages_; ++s) {
      rounds_.emplace_back();
      for (const PlannedCollective& c : plan.collectives)
        if (c.stage == s && c.after_round >= 0) rounds_.back().push_back(c.after_round);
    }
    for (int d = 0; d < static_cast<int>(plan.lanes.size()); ++d)
      for (int s = 0; s < stages_; ++s) {
        collect_rounds(d, s);
        queue_.push_back({d, s});
      }
  }

  std::string run() {
    while (!queue_.empty()) {
      const Where w = queue_.front();
      queue_.pop_front();
      at(w).queued = false;
      while (advance(w)) {
      }
    }
    return blocked();
  }

 private:
  static constexpr std::size_t kKinds = 5;  ///< that compute
  struct Where {
    int dp, stage;
  };
  struct Lane {
    std::size_t op = 0;
    std::size_t collective = 0;  ///< joined so far, of its stage's list
    bool arrived = false;        ///< at a meeting
    bool queued = true;
    std::vector<int> rounds_left;        ///< of its backwards to come, descending
    std::array<int, 2> in_flight{0, 0};  ///< sent and not received, by payload
  };

  Lane& at(Where w) {
    return at_[static_cast<std::size_t>(w.dp) * static_cast<std::size_t>(stages_) +
               static_cast<std::size_t>(w.stage)];
  }
  const std::vector<Op>& ops(Where w) const {
    return plan_.schedule(w.dp).stages[static_cast<std::size_t>(w.stage)];
  }
  static bool ends_backward(OpKind kind) {
    return kind == OpKind::backward || kind == OpKind::backward_weight;
  }

  void collect_rounds(int d, int s) {
    if (rounds_[static_cast<std::size_t>(s)].empty()) return;
    std::vector<int>& left = at({d, s}).rounds_left;
    for (const Op& op : ops({d, s}))
      if (ends_backward(op.kind)) left.push_back(plan_.micro_batch(d, op.micro_batch).round);
    std::reverse(left.begin(), left.end());
  }

  void wake(Where w) {
    if (w.stage < 0 || w.stage >= stages_ || at(w).queued) return;
    at(w).queued = true;
    queue_.push_back(w);
  }

  /// The collective that the lane must join before its next op, or none.
  bool collective_due(Where w) {
    const Lane& lane = at(w);
    const auto& rounds = rounds_[static_cast<std::size_t>(w.stage)];
    return lane.collective < rounds.size() &&
           (lane.rounds_left.empty() || lane.rounds_left.back() > rounds[lane.collective]);
  }

  bool join(Where w) {
    Lane& lane = at(w);
    if (lane.arrived) return false;
    lane.arrived = true;
    const auto s = static_cast<std::size_t>(w.stage);
    waiting_[s] += 1;
    if (waiting_[s] < plan_.mesh.dp) return false;
    waiting_[s] = 0;
    for (int d = 0; d < plan_.mesh.dp; ++d) {
      Lane& other = at({d, w.stage});
      other.arrived = false;
      ++other.collective;
      if (d != w.dp) wake({d, w.stage});
    }
    return true;
  }

  bool advance(Where w) {
    if (collective_due(w)) return join(w);
    Lane& lane = at(w);
    if (lane.op >= ops(w).size()) return false;
    const Op& op = ops(w)[lane.op];
    if (op.kind == OpKind::send || op.kind == OpKind::recv) return transfer(w, op);
    if (computes(op.kind)) return compute(w, op);
    ++lane.op;
    return true;
  }

  bool transfer(Where w, const Op& op) {
    const bool send = op.kind == OpKind::send;
    const Where from = send ? w : Where{w.dp, op.peer};
    const std::size_t payload = op.payload == Payload::activation ? 0 : 1;
    auto sent =
        sent_[((first_[static_cast<std::size_t>(w.dp)] + static_cast<std::size_t>(op.micro_batch)) *
                   static_cast<std::size_t>(stages_) +
               static_cast<std::size_t>(from.stage)) *
                  2 +
              payload];
    int& in_flight = at(from).in_flight[payload];
    if (send ? in_flight >= static_cast<int>(kTransfersAhead) : !sent) return false;
    sent = send;
    in_flight += send ? 1 : -1;
    ++at(w).op;
    wake({w.dp, op.peer});
    return true;
  }

  bool compute(Where w, const Op& op) {
    const PlannedMicroBatch& m = plan_.micro_batch(w.dp, op.micro_batch);
    Lane& lane = at(w);
    if (m.group.ranks > 1) {
      if (lane.arrived) return false;
      const int id = plan_.lanes[static_cast<std::size_t>(w.dp)]
                         .micro_batches[static_cast<std::size_t>(op.micro_batch)];
      int& met = met_[(static_cast<std::size_t>(id) * static_cast<std::size_t>(stages_) +
                       static_cast<std::size_t>(w.stage)) *
                          kKinds +
                      static_cast<std::size_t>(op.kind)];
      lane.arrived = true;
      if (++met < m.group.ranks) return false;
      for (int d = m.group.first; d < m.group.first + m.group.ranks; ++d) {
        finish({d, w.stage});
        if (d != w.dp) wake({d, w.stage});
      }
    } else {
      finish(w);
    }
    return true;
  }

  void finish(Where w) {
    Lane& lane = at(w);
    lane.arrived = false;
    if (ends_backward(ops(w)[lane.op].kind) && !lane.rounds_left.empty())
      lane.rounds_left.pop_back();
    ++lane.op;
  }

  std::string blocked() {
    constexpr int kShown = 8;
    int count = 0;
    std::string text;
    for (int d = 0; d < plan_.mesh.dp; ++d)
      for (int s = 0; s < stages_; ++s) {
        const Where w{d, s};
        const bool due = collective_due(w);
        if (!due && at(w).op >= ops(w).size()) continue;
        if (++count <= kShown)
          text += fmt::format("\n  data-parallel rank {} stage {}: {}", d, s,
                              due ? waiting_collective(w) : waiting_op(w));
      }
    if (count == 0) return "";
    if (count > kShown) text += fmt::format("\n  and {} more", count - kShown);
    return "the step deadlocks; these wait for one another:" + text;
  }

  std::string waiting_collective(Where w) {
    return fmt::format("the collective after round {}",
                       rounds_[static_cast<std::size_t>(w.stage)][at(w).collective]);
  }

  std::string waiting_op(Where w) {
    const Op& op = ops(w)[at(w).op];
    const int id = plan_.lanes[static_cast<std::size_t>(w.dp)]
                       .micro_batches[static_cast<std::size_t>(op.micro_batch)];
    const RankGroup group = plan_.micro_batch(w.dp, op.micro_batch).group;
    std::string text = fmt::format("{} of micro-batch {}", name(op.kind), id);
    if (op.peer >= 0)
      text += fmt::format(" {} stage {}", op.kind == OpKind::send ? "to" : "from", op.peer);
    else if (group.ranks > 1)
      text += fmt::format(" with ranks {} to {}", group.first, group.first + group.ranks - 1);
    return text;
  }

  const StepPlan& plan_;
  int stages_;
  std::vector<std::size_t> first_;        ///< [dp] of its micro-batches among all lanes' lists
  std::vector<Lane> at_;                  ///< [dp][stage]
  std::vector<int> met_;                  ///< [micro-batch][stage][kind] ranks that have come
  std::vector<bool> sent_;                ///< [place in all lists][from stage][payload]
  std::vector<std::vector<int>> rounds_;  ///< [stage] after_round of its collectives, in order
  std::vector<int> waiting_;              ///< [stage] ranks that have come to its collective
  std::deque<Where> queue_;
};

/// Backwards come with rounds ascending where collectives meet by them.
std::string rounds(const StepPlan& plan) {
  if (std::none_of(plan.collectives.begin(), plan.collectives.end(),
                   [](const PlannedCollective& c) { return c.after_round >= 0; }))
    return "";
  for (int d = 0; d < plan.mesh.dp; ++d)
    for (int s = 0; s < plan.mesh.pp; ++s) {
      int last = -1;
      for (const Op& op : plan.schedule(d).stages[static_cast<std::size_t>(s)]) {
        if (op.kind != OpKind::backward && op.kind != OpKind::backward_weight) continue;
        const int round = plan.micro_batch(d, op.micro_batch).round;
        if (round <= last)
          return fmt::format("data-parallel rank {} stage {}: round {} ends after round {}", d, s,
                             round, last);
        last = round;
      }
    }
  return "";
}

}  // namespace

std::string problems(const StepPlan& plan) {
  if (std::string wrong = sizes(plan); !wrong.empty()) return wrong;
  for (int id = 0; id < static_cast<int>(plan.micro_batches.size()); ++id)
    if (std::string wrong = values(plan, id); !wrong.empty()) return wrong;
  for (const auto check : {placement, schedules, rounds})
    if (std::string wrong = check(plan); !wrong.empty()) return wrong;
  return Replay(plan).run();
}

}  // namespace ballast
