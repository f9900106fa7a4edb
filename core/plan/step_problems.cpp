#include "core/plan/step_problems.hpp"

#include <array>
#include <deque>
#include <map>
#include <set>

#include "core/plan/pipeline/pipeline_schedule.hpp"

namespace ballast {
namespace {

template <class T>
bool outside(int place, const std::vector<T>& list) {
  return place < 0 || place >= static_cast<int>(list.size());
}

std::string sizes(const StepPlan& plan) {
  const MeshShape& mesh = plan.mesh;
  if (const auto wrong = problems(mesh, 0); !wrong.empty()) return wrong.front().message();
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
  for (std::size_t id = 0; id < held.size(); ++id)
    if (const RankGroup group = plan.micro_batches[id].group; held[id] != group.ranks)
      return fmt::format("micro-batch {}: {} of the {} ranks of its group hold it", id, held[id],
                         group.ranks);
  return "";
}

/// A dependent chunk follows the chunk before it in the list of every rank of one group.
std::string chunks(const StepPlan& plan) {
  for (int d = 0; d < plan.mesh.dp; ++d) {
    std::map<std::pair<std::int64_t, std::int64_t>, RankGroup> ends;  // sample, tokens so far
    for (const int id : plan.lanes[static_cast<std::size_t>(d)].micro_batches) {
      const PlannedMicroBatch& m = plan.micro_batches[static_cast<std::size_t>(id)];
      for (const Segment& s : m.segments) {
        if (s.begin > 0) {
          const auto before = ends.find({s.sample, s.begin});
          if (before == ends.end() || !(before->second == m.group))
            return fmt::format(
                "data-parallel rank {}: micro-batch {} begins at token {} of sample "
                "{}, and its group has not the chunk before it",
                d, id, s.begin, s.sample);
        }
        ends[{s.sample, s.end}] = m.group;
      }
    }
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
      if (op.kind == OpKind::collective) continue;
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

/// Where gradients are reduced by round, every stage's list joins all rounds in order, each behind
/// the backward of that round.
std::string rounds(const StepPlan& plan) {
  const int expected = plan.reduces_by_round() ? plan.rounds() : 0;
  for (int d = 0; d < plan.mesh.dp; ++d)
    for (int s = 0; s < plan.mesh.pp; ++s) {
      int joined = 0;
      const auto wrong = [&](const std::string& text) {
        return fmt::format("data-parallel rank {} stage {}: {} after {} collectives", d, s, text,
                           joined);
      };
      for (const Op& op : plan.schedule(d).stages[static_cast<std::size_t>(s)]) {
        if (op.kind == OpKind::collective && op.micro_batch != joined++)
          return wrong(fmt::format("the one of round {}", op.micro_batch));
        if (expected > 0 && completes_gradients(op.kind))
          if (const int round = plan.micro_batch(d, op.micro_batch).round; round != joined)
            return wrong(fmt::format("a backward of round {} ends", round));
      }
      if (joined != expected) return wrong(fmt::format("the list of {} rounds ends", expected));
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
        joined_(static_cast<std::size_t>(plan.rounds() * stages_), 0) {
    for (int d = 0; d < static_cast<int>(plan.lanes.size()); ++d)
      for (int s = 0; s < stages_; ++s) queue_.push_back({d, s});
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
  /// Messages of one payload that a stage has sent, and how many of them the neighbour has
  /// received.
  struct Wire {
    std::vector<int> sent;
    std::size_t received = 0;
  };
  struct Lane {
    std::size_t op = 0;
    bool arrived = false;  ///< at a meeting
    bool queued = true;
    std::array<Wire, 2> wires;  ///< activations, gradients
  };

  Lane& at(Where w) {
    return at_[static_cast<std::size_t>(w.dp) * static_cast<std::size_t>(stages_) +
               static_cast<std::size_t>(w.stage)];
  }
  const std::vector<Op>& ops(Where w) const {
    return plan_.schedule(w.dp).stages[static_cast<std::size_t>(w.stage)];
  }
  int id(Where w, const Op& op) const {
    return plan_.lanes[static_cast<std::size_t>(w.dp)]
        .micro_batches[static_cast<std::size_t>(op.micro_batch)];
  }

  void wake(Where w) {
    if (at(w).queued) return;
    at(w).queued = true;
    queue_.push_back(w);
  }

  bool advance(Where w) {
    Lane& lane = at(w);
    if (lane.op >= ops(w).size()) return false;
    const Op& op = ops(w)[lane.op];
    if (op.kind == OpKind::send) return send(w, op);
    if (op.kind == OpKind::recv) return receive(w, op);
    if (op.kind == OpKind::collective)
      return meet(w, {0, plan_.mesh.dp},
                  joined_[static_cast<std::size_t>(op.micro_batch * stages_ + w.stage)]);
    if (computes(op.kind)) {
      const auto m = static_cast<std::size_t>(id(w, op));
      return meet(w, plan_.micro_batches[m].group,
                  met_[(m * static_cast<std::size_t>(stages_) + static_cast<std::size_t>(w.stage)) *
                           kKinds +
                       static_cast<std::size_t>(op.kind)]);
    }
    ++lane.op;
    return true;
  }

  Wire& wire(Where from, const Op& op) {
    return at(from).wires[op.payload == Payload::activation ? 0 : 1];
  }

  bool send(Where w, const Op& op) {
    Wire& out = wire(w, op);
    if (out.sent.size() - out.received >= kTransfersAhead) return false;
    out.sent.push_back(op.micro_batch);
    ++at(w).op;
    wake({w.dp, op.peer});
    return true;
  }

  bool receive(Where w, const Op& op) {
    Wire& in = wire({w.dp, op.peer}, op);
    if (in.received == in.sent.size() || in.sent[in.received] != op.micro_batch) return false;
    ++in.received;
    ++at(w).op;
    wake({w.dp, op.peer});
    return true;
  }

  /// The ranks of `group` go on together once all of them have come.
  bool meet(Where w, RankGroup group, int& come) {
    if (at(w).arrived) return false;
    at(w).arrived = true;
    if (++come < group.ranks) return false;
    for (int d = group.first; d < group.first + group.ranks; ++d) {
      Lane& lane = at({d, w.stage});
      lane.arrived = false;
      ++lane.op;
      if (d != w.dp) wake({d, w.stage});
    }
    return true;
  }

  std::string blocked() {
    constexpr int kShown = 8;
    int count = 0;
    std::string text;
    for (int d = 0; d < plan_.mesh.dp; ++d)
      for (int s = 0; s < stages_; ++s)
        if (const Where w{d, s}; at(w).op < ops(w).size() && ++count <= kShown)
          text += fmt::format("\n  data-parallel rank {} stage {}: {}", d, s, waiting(w));
    if (count == 0) return "";
    if (count > kShown) text += fmt::format("\n  and {} more", count - kShown);
    return "the step deadlocks; these wait for one another:" + text;
  }

  std::string waiting(Where w) {
    const Op& op = ops(w)[at(w).op];
    if (op.kind == OpKind::collective) return fmt::format("collective of round {}", op.micro_batch);
    std::string text = fmt::format("{} of micro-batch {}", name(op.kind), id(w, op));
    if (op.kind == OpKind::send) return text + fmt::format(" to stage {}", op.peer);
    const RankGroup group = plan_.micro_batch(w.dp, op.micro_batch).group;
    if (op.kind == OpKind::recv) {
      text += fmt::format(" from stage {}", op.peer);
      if (const Wire& in = wire({w.dp, op.peer}, op); in.received < in.sent.size())
        text += ", which sent another one first";
    } else if (group.ranks > 1) {
      text += fmt::format(" with ranks {} to {}", group.first, group.first + group.ranks - 1);
    }
    return text;
  }

  const StepPlan& plan_;
  int stages_;
  std::vector<Lane> at_;     ///< [dp][stage]
  std::vector<int> met_;     ///< [micro-batch][stage][kind] ranks that have come
  std::vector<int> joined_;  ///< [round][stage] ranks that have come to its collective
  std::deque<Where> queue_;
};

}  // namespace

std::string problems(const StepPlan& plan) {
  if (std::string wrong = sizes(plan); !wrong.empty()) return wrong;
  for (int id = 0; id < static_cast<int>(plan.micro_batches.size()); ++id)
    if (std::string wrong = values(plan, id); !wrong.empty()) return wrong;
  for (const auto check : {placement, chunks, schedules, rounds})
    if (std::string wrong = check(plan); !wrong.empty()) return wrong;
  return Replay(plan).run();
}

}  // namespace ballast
