#include "core/plan/shared_lanes.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <set>
#include <tuple>

#include "core/base/error.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/schedule_lists.hpp"

namespace ballast {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// How far forwards may be ahead, and what a backward is.
struct Rules {
  enum class Ahead { all, one_f_one_b, bounded } ahead = Ahead::one_f_one_b;
  bool halves = false;  ///< backward in an input and a weight half
};

/// Lanes with one list, walked as one.
struct Lane {
  std::vector<int> ids;                         ///< ascending: ids[place]
  std::vector<ScheduleItem> forward, backward;  ///< micro_batch: an id
  std::vector<std::vector<Op>> lists;           ///< [stage], of places
};

/// One order of samples over all lanes; see step_order.hpp.
class SharedScheduler {
 public:
  /// `order`: groups of ids, chunks of one sample ascending, in the common order.
  SharedScheduler(const StepPlan& plan, std::vector<Lane> lanes, const ChunkGroups& order,
                  const PipelineOptions& options, const ScheduleCosts& costs, Rules rules)
      : plan_(plan),
        lanes_(std::move(lanes)),
        stages_(options.stages),
        k_(options.k),
        costs_(costs),
        rules_(rules) {
    const std::size_t ids = plan.micro_batches.size();
    holders_.resize(ids);
    for (std::size_t l = 0; l < lanes_.size(); ++l)
      for (const int id : lanes_[l].ids)
        holders_[static_cast<std::size_t>(id)].push_back(static_cast<int>(l));
    for (const ScheduleItem& item : forward_order(order))
      for (const int l : holders_[static_cast<std::size_t>(item.micro_batch)])
        lanes_[static_cast<std::size_t>(l)].forward.push_back(item);
    for (Lane& lane : lanes_) {
      lane.backward = backwards(lane.forward);
      lane.lists.assign(static_cast<std::size_t>(stages_), {});
    }
    at_.resize(lanes_.size() * static_cast<std::size_t>(stages_));
    ops_.resize(ids * static_cast<std::size_t>(stages_));
    number_rounds(order);
  }

  /// Seconds of the whole.
  double run() {
    queued_.assign((std::max(ops_.size(), static_cast<std::size_t>(rounds_ * stages_))) * kWays, 0);
    for (int l = 0; l < static_cast<int>(lanes_.size()); ++l)
      for (int s = 0; s < stages_; ++s) offer(l, s);
    double end = 0;
    while (!queue_.empty()) {
      Candidate c = queue_.top();
      queue_.pop();
      const double begin = begin_of(c);
      if (begin > c.begin && begin != kNever) {
        c.begin = begin;
        queue_.push(c);
        continue;
      }
      queued(c) = 0;
      if (begin != kNever) end = std::max(end, take(c));
    }
    for (int l = 0; l < static_cast<int>(lanes_.size()); ++l)
      for (int s = 0; s < stages_; ++s) {
        const std::size_t backwards = lanes_[static_cast<std::size_t>(l)].backward.size();
        require(at(l, s).ended == backwards && at(l, s).joined == rounds_,
                "step order: stage {} stops after {} of {} backwards", s, at(l, s).ended,
                backwards);
      }
    join_halves();
    return end;
  }

  const std::vector<Lane>& lanes() const { return lanes_; }
  const std::vector<int>& rounds() const { return round_; }

 private:
  struct State {
    double free = 0;
    std::size_t forwards = 0, backwards = 0;
    std::size_t ended = 0;            ///< backwards whose gradients are complete
    int live = 0;                     ///< micro-batches whose activations are here
    std::deque<std::size_t> weights;  ///< places in the backward order of halves to come
    int joined = 0;                   ///< collectives
  };
  /// Of one micro-batch on one stage.
  struct Progress {
    double output_at = kNever, gradient_at = kNever;  ///< at the next stage, at the stage before
    bool formed = false;                              ///< its activations are here
  };
  struct Candidate {
    double begin = 0;
    int preference = 0, micro_batch = 0, stage = 0;  ///< micro_batch: the round of a collective
    OpKind kind = OpKind::forward;
    ScheduleItem item;
    bool operator<(const Candidate& o) const {  // the queue takes the greatest first
      return std::tie(begin, preference, micro_batch, stage) >
             std::tie(o.begin, o.preference, o.micro_batch, o.stage);
    }
  };

  State& at(int lane, int s) { return at_[static_cast<std::size_t>(lane * stages_ + s)]; }
  Progress& progress(int id, int s) { return ops_[static_cast<std::size_t>(id * stages_ + s)]; }
  bool discarded(const ScheduleItem& i) const {
    return rules_.ahead == Rules::Ahead::bounded && i.chunk < i.chunks - k_;
  }
  int round(const ScheduleItem& i) const { return round_[static_cast<std::size_t>(i.micro_batch)]; }

  void number_rounds(const ChunkGroups& order) {
    // Of the own lanes alone: other parts of the step are numbered at the same time.
    round_.assign(plan_.micro_batches.size(), 0);
    for (const Lane& lane : lanes_)
      for (const int id : lane.ids)
        round_[static_cast<std::size_t>(id)] =
            plan_.micro_batches[static_cast<std::size_t>(id)].round;
    const bool kept = std::all_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
      return std::adjacent_find(lane.backward.begin(), lane.backward.end(),
                                [&](const ScheduleItem& a, const ScheduleItem& b) {
                                  return round(a) >= round(b);
                                }) == lane.backward.end();
    });
    std::vector<int> next(lanes_.size(), 0);
    for (const ScheduleItem& item : backwards(forward_order(order))) {
      const auto& lanes = holders_[static_cast<std::size_t>(item.micro_batch)];
      int& own = round_[static_cast<std::size_t>(item.micro_batch)];
      if (!kept) own = 0;
      for (const int l : lanes)
        if (!kept) own = std::max(own, next[static_cast<std::size_t>(l)]);
      for (const int l : lanes) next[static_cast<std::size_t>(l)] = own + 1;
      if (plan_.reduces_by_round()) rounds_ = std::max(rounds_, own + 1);
    }
  }
  std::vector<ScheduleItem> backwards(std::vector<ScheduleItem> forwards) const {
    if (rules_.ahead != Rules::Ahead::all) return backward_order(std::move(forwards));
    std::reverse(forwards.begin(), forwards.end());
    return forwards;
  }

  template <class F>
  void offers(int l, int s, F&& each) {
    const Lane& lane = lanes_[static_cast<std::size_t>(l)];
    const State& state = at(l, s);
    // A collective as soon as no backward of its round or an earlier one is left.
    if (state.joined < rounds_ &&
        (state.ended == lane.backward.size() || round(lane.backward[state.ended]) > state.joined))
      each(OpKind::collective, ScheduleItem{state.joined, 0, 1}, 0.0, 0);
    const ScheduleItem* again = nullptr;
    if (state.backwards < lane.backward.size()) {
      const ScheduleItem& next = lane.backward[state.backwards];
      if (progress(next.micro_batch, s).formed) {
        if (may_go_back(l, s, next))
          each(rules_.halves ? OpKind::backward_input : OpKind::backward, next,
               s + 1 < stages_ ? progress(next.micro_batch, s + 1).gradient_at : 0.0, 1);
      } else if (discarded(next) && !next.last()) {
        again = &next;
      }
    }
    const bool room = fits(state, s, again != nullptr ? 1 : 0);
    if (again != nullptr && fits(state, s, 0)) each(OpKind::recompute, *again, 0.0, 2);
    if (state.forwards < lane.forward.size()) {
      const ScheduleItem& next = lane.forward[state.forwards];
      if (may_go_forward(l, s, room))
        each(OpKind::forward, next, s > 0 ? progress(next.micro_batch, s - 1).output_at : 0.0, 3);
    }
    if (again == nullptr && room)
      if (const ScheduleItem* early = early_recompute(lane, state, s))
        each(OpKind::recompute, *early, 0.0, 4);
    if (!state.weights.empty())
      if (const ScheduleItem& next = lane.backward[state.weights.front()];
          rounds_ == 0 || round(next) == state.joined)
        each(OpKind::backward_weight, next, 0.0, 5);
  }

  bool may_go_back(int l, int s, const ScheduleItem& next) {
    const State& state = at(l, s);
    if (s > 0 && state.backwards - at(l, s - 1).backwards >= kTransfersAhead) return false;
    if (rules_.ahead == Rules::Ahead::all &&
        state.forwards < lanes_[static_cast<std::size_t>(l)].forward.size())
      return false;
    return rounds_ == 0 || rules_.halves || round(next) == state.joined;
  }
  bool may_go_forward(int l, int s, bool room) {
    const Lane& lane = lanes_[static_cast<std::size_t>(l)];
    const State& state = at(l, s);
    if (s + 1 < stages_ && state.forwards - at(l, s + 1).forwards >= kTransfersAhead) return false;
    if (rules_.ahead == Rules::Ahead::all) return true;
    if (rules_.ahead == Rules::Ahead::bounded)
      return room || discarded(lane.forward[state.forwards]);
    if (state.backwards >= lane.backward.size()) return true;
    const std::size_t group_end =
        state.backwards + static_cast<std::size_t>(lane.backward[state.backwards].chunk) + 1;
    return state.forwards < group_end + static_cast<std::size_t>(stages_ - 1 - s);
  }
  bool fits(const State& state, int s, int reserved) const {
    if (rules_.ahead != Rules::Ahead::bounded) return true;
    const int whole = state.live - static_cast<int>(state.weights.size());
    return whole + reserved < k_ + stages_ - 1 - s && state.live + reserved < k_ + stages_ - 1;
  }
  /// The next chunk to recompute of the sample whose backward is next, once the sample is
  /// forwarded.
  const ScheduleItem* early_recompute(const Lane& lane, const State& state, int s) {
    if (rules_.ahead != Rules::Ahead::bounded || state.backwards >= lane.backward.size())
      return nullptr;
    std::size_t b = state.backwards;
    const std::size_t end = b + static_cast<std::size_t>(lane.backward[b].chunk) + 1;
    if (state.forwards < end) return nullptr;
    for (; b < end; ++b)
      if (!progress(lane.backward[b].micro_batch, s).formed) return &lane.backward[b];
    return nullptr;
  }

  const std::vector<int>& holders(const Candidate& c) {
    if (c.kind != OpKind::collective) return holders_[static_cast<std::size_t>(c.micro_batch)];
    if (all_.empty()) {
      all_.resize(lanes_.size());
      std::iota(all_.begin(), all_.end(), 0);
    }
    return all_;
  }

  /// Whether a candidate is in the queue.  One that is there already would only be put off: an op
  /// never begins earlier than it could before.
  char& queued(const Candidate& c) {
    return queued_[static_cast<std::size_t>((c.micro_batch * stages_ + c.stage) * kWays +
                                            c.preference)];
  }

  void offer(int l, int s) {
    offers(l, s, [&](OpKind kind, const ScheduleItem& item, double ready, int preference) {
      if (ready == kNever) return;
      Candidate c{0, preference, item.micro_batch, s, kind, item};
      if (queued(c) != 0) return;
      c.begin = begin_of(c);
      if (c.begin == kNever) return;
      queued(c) = 1;
      queue_.push(c);
    });
  }

  /// When an op can begin on all lanes that share it; never while one of them does not offer it.
  double begin_of(const Candidate& c) {
    double begin = 0;
    for (const int l : holders(c)) {
      double own = kNever;
      offers(l, c.stage, [&](OpKind kind, const ScheduleItem& item, double ready, int) {
        if (kind == c.kind && item.micro_batch == c.micro_batch)
          own = std::max(at(l, c.stage).free, ready);
      });
      begin = std::max(begin, own);
      if (begin == kNever) return kNever;
    }
    return begin;
  }

  double take(const Candidate& c) {
    double end = c.begin;
    if (c.kind != OpKind::collective)
      end += costs_.duration(c.stage, {c.kind, c.micro_batch, c.item.chunk});
    // A copy: what is offered changes while lanes go on.
    const std::vector<int> lanes = holders(c);
    for (const int l : lanes) {
      record(lanes_[static_cast<std::size_t>(l)], c);
      account(at(l, c.stage), c);
      at(l, c.stage).free = end;
    }
    if (c.kind != OpKind::collective) advance(c, end);
    for (const int l : lanes)
      for (int s = std::max(0, c.stage - 1); s < std::min(stages_, c.stage + 2); ++s) offer(l, s);
    return end;
  }

  void record(Lane& lane, const Candidate& c) {
    std::vector<Op>& ops = lane.lists[static_cast<std::size_t>(c.stage)];
    if (c.kind == OpKind::collective) {
      ops.push_back({OpKind::collective, c.micro_batch});
      return;
    }
    ScheduleItem item = c.item;
    item.micro_batch = static_cast<int>(
        std::lower_bound(lane.ids.begin(), lane.ids.end(), c.micro_batch) - lane.ids.begin());
    StageList list(ops, c.stage, stages_);
    if (c.kind == OpKind::forward)
      list.forward(item);
    else if (c.kind == OpKind::recompute)
      list.recompute(item);
    else if (c.kind == OpKind::backward_weight)
      list.weights(item);
    else
      list.backward(item, c.kind);
  }

  void account(State& state, const Candidate& c) {
    switch (c.kind) {
      case OpKind::collective:
        ++state.joined;
        break;
      case OpKind::forward:
        ++state.forwards;
        if (!discarded(c.item)) ++state.live;
        break;
      case OpKind::recompute:
        ++state.live;
        break;
      case OpKind::backward_weight:
        state.weights.pop_front();
        --state.live;
        ++state.ended;
        break;
      default:
        if (rules_.halves) {
          state.weights.push_back(state.backwards);
        } else {
          --state.live;
          ++state.ended;
        }
        ++state.backwards;
        break;
    }
  }

  void advance(const Candidate& c, double end) {
    const auto arrival = [&](int to, Payload payload) {
      return to < 0 || to >= stages_ ? end
                                     : end + costs_.duration(c.stage, {OpKind::send, c.micro_batch,
                                                                       c.item.chunk, to, payload});
    };
    Progress& own = progress(c.micro_batch, c.stage);
    if (c.kind == OpKind::forward) {
      own.formed = !discarded(c.item);
      own.output_at = arrival(c.stage + 1, Payload::activation);
    } else if (c.kind == OpKind::recompute) {
      own.formed = true;
    } else if (c.kind != OpKind::backward_weight) {
      own.formed = false;
      own.gradient_at = arrival(c.stage - 1, Payload::gradient);
    }
  }

  /// Halves that follow each other directly in every list that has them are one backward.
  void join_halves() {
    if (!rules_.halves) return;
    for (int s = 0; s < stages_; ++s) {
      std::map<int, int> apart;  // id -> lists in which something stands between its halves
      const auto each = [&](Lane& lane, auto&& found) {
        std::vector<Op>& ops = lane.lists[static_cast<std::size_t>(s)];
        for (std::size_t i = 0; i + 1 < ops.size(); ++i)
          if (ops[i].kind == OpKind::backward_input &&
              ops[i + 1] == Op{OpKind::backward_weight, ops[i].micro_batch, ops[i].chunk})
            found(ops, i, lane.ids[static_cast<std::size_t>(ops[i].micro_batch)]);
      };
      for (Lane& lane : lanes_) {
        for (const int id : lane.ids) ++apart[id];
        each(lane, [&](std::vector<Op>&, std::size_t, int id) { --apart[id]; });
      }
      for (Lane& lane : lanes_)
        each(lane, [&](std::vector<Op>& ops, std::size_t i, int id) {
          if (apart[id] != 0) return;
          ops[i].kind = OpKind::backward;
          ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        });
    }
  }

  const StepPlan& plan_;
  std::vector<Lane> lanes_;
  int stages_, k_;
  const ScheduleCosts& costs_;
  Rules rules_;
  int rounds_ = 0;                         ///< that collectives follow
  std::vector<int> round_;                 ///< [id]
  std::vector<std::vector<int>> holders_;  ///< [id] lanes
  std::vector<int> all_;                   ///< lanes
  std::vector<State> at_;                  ///< [lane][stage]
  std::vector<Progress> ops_;              ///< [id][stage]
  static constexpr int kWays = 6;          ///< preferences
  std::vector<char> queued_;               ///< [micro-batch or round][stage][preference]
  std::priority_queue<Candidate> queue_;
};

/// What is scheduled: lanes of one list walk together.
struct Shared {
  std::vector<Lane> lanes;
  std::vector<std::size_t> place;  ///< among them, of each data-parallel rank
  std::vector<int> ids;
  ChunkGroups groups;  ///< of ids
};

Shared collect(const StepPlan& plan, const std::vector<int>& ranks) {
  Shared shared;
  std::map<std::vector<int>, std::size_t> places;
  std::set<int> held;
  for (const int d : ranks) {
    const std::vector<int>& ids = plan.lanes[static_cast<std::size_t>(d)].micro_batches;
    const auto [at, added] = places.emplace(ids, shared.lanes.size());
    if (added) shared.lanes.push_back({ids, {}, {}, {}});
    shared.place.push_back(at->second);
    held.insert(ids.begin(), ids.end());
  }
  shared.ids.assign(held.begin(), held.end());
  std::map<int, std::vector<int>> groups;  // by first id; lanes that share one agree on it
  for (const int d : ranks) {
    const std::vector<int>& ids = plan.lanes[static_cast<std::size_t>(d)].micro_batches;
    for (std::vector<int> group : chunk_groups(plan.list(d))) {
      for (int& m : group) m = ids[static_cast<std::size_t>(m)];
      groups.emplace(group.front(), std::move(group));
    }
  }
  for (auto& [first, group] : groups) shared.groups.push_back(std::move(group));
  return shared;
}

/// Common orders to try: as given; for state-aware schedules also the longest and the shortest
/// first.
std::vector<ChunkGroups> orders(ChunkGroups groups, const PipelineOptions& options,
                                const ScheduleCosts& costs) {
  std::vector<ChunkGroups> list{groups};
  if (!state_aware(options.schedule)) return list;
  std::map<int, double> work;  // by first id
  for (const auto& group : groups)
    for (const int id : group)
      work[group.front()] +=
          costs.duration(0, {OpKind::forward, id}) + costs.duration(0, {OpKind::backward, id});
  for (const double sign : {-1.0, 1.0}) {
    if (static_cast<int>(list.size()) >= options.search) break;
    std::stable_sort(groups.begin(), groups.end(), [&](const auto& a, const auto& b) {
      return sign * work[a.front()] < sign * work[b.front()];
    });
    list.push_back(groups);
  }
  return list;
}

std::vector<Rules> rules_of(const PipelineOptions& options) {
  if (options.schedule == ScheduleKind::gpipe) return {{Rules::Ahead::all}};
  if (options.schedule == ScheduleKind::one_f_one_b) return {{Rules::Ahead::one_f_one_b}};
  std::vector<Rules> list{{Rules::Ahead::bounded}};
  if (options.schedule == ScheduleKind::zero_bubble && options.stages > 1)
    list.push_back({Rules::Ahead::bounded, true});
  return list;
}

}  // namespace

std::vector<Schedule> schedule_shared(StepPlan& plan, const std::vector<int>& lanes,
                                      const PipelineOptions& options, const ScheduleCosts& costs) {
  require(options.k >= 1, "pipeline schedule: k = {} chunks; must be at least 1", options.k);
  const Shared shared = collect(plan, lanes);
  double best = kNever;
  std::vector<Lane> chosen;
  std::vector<int> rounds;
  for (const ChunkGroups& order : orders(shared.groups, options, costs))
    for (const Rules& rules : rules_of(options)) {
      SharedScheduler scheduler(plan, shared.lanes, order, options, costs, rules);
      const double end = scheduler.run();
      if (end >= best) continue;
      best = end;
      chosen = scheduler.lanes();
      rounds = scheduler.rounds();
    }
  for (const int id : shared.ids)
    plan.micro_batches[static_cast<std::size_t>(id)].round = rounds[static_cast<std::size_t>(id)];
  std::vector<Schedule> schedules;
  for (const std::size_t p : shared.place) {
    Schedule schedule{chosen[p].lists};
    schedules.push_back(options.offload ? with_offload(schedule) : std::move(schedule));
  }
  return schedules;
}

}  // namespace ballast
