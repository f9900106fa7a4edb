#include "core/pipeline_schedule.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "core/error.hpp"
#include "core/random.hpp"

namespace ballast {
namespace {

/// One chunk in the order of execution.
struct Item {
  int micro_batch = 0, chunk = 0, chunks = 1;
  bool last() const { return chunk == chunks - 1; }
};

/// Forward order: groups one after another, chunks ascending.
std::vector<Item> forward_order(const ChunkGroups& groups) {
  std::vector<Item> order;
  for (const auto& group : groups) {
    require(!group.empty(), "pipeline schedule: a group without micro-batches");
    for (int c = 0; c < static_cast<int>(group.size()); ++c) order.push_back({group[c], c, static_cast<int>(group.size())});
  }
  return order;
}

/// Backward order: groups in the same order, chunks descending.
std::vector<Item> backward_order(std::vector<Item> order) {
  for (auto begin = order.begin(); begin != order.end();) {
    const auto end = begin + begin->chunks;
    std::reverse(begin, end);
    begin = end;
  }
  return order;
}

/// The list of one stage, with its transfers.
class StageList {
 public:
  StageList(std::vector<Op>& ops, int stage, int stages) : ops_(ops), stage_(stage), last_(stages - 1) {}
  void forward(const Item& i) {
    if (stage_ > 0) ops_.push_back({OpKind::recv, i.micro_batch, i.chunk, stage_ - 1, Payload::activation});
    ops_.push_back({OpKind::forward, i.micro_batch, i.chunk});
    if (stage_ < last_) ops_.push_back({OpKind::send, i.micro_batch, i.chunk, stage_ + 1, Payload::activation});
  }
  void recompute(const Item& i) { ops_.push_back({OpKind::recompute, i.micro_batch, i.chunk}); }
  void backward(const Item& i) {
    if (stage_ < last_) ops_.push_back({OpKind::recv, i.micro_batch, i.chunk, stage_ + 1, Payload::gradient});
    ops_.push_back({OpKind::backward, i.micro_batch, i.chunk});
    if (stage_ > 0) ops_.push_back({OpKind::send, i.micro_batch, i.chunk, stage_ - 1, Payload::gradient});
  }

 private:
  std::vector<Op>& ops_;
  int stage_, last_;
};

Schedule empty_schedule(int stages) {
  require(stages >= 1, "pipeline schedule: {} stages; must be at least 1", stages);
  Schedule schedule;
  schedule.stages.resize(stages);
  return schedule;
}

struct Built {
  Schedule schedule;
  double end_s = 0;
};

/// List scheduling of one order of groups; see the header.
class ListScheduler {
 public:
  struct Rules {
    bool recompute_first = true;  ///< where a recompute and a forward could both begin
    bool early_recompute = true;  ///< a recompute may take a free slot before its turn, in time that the stage would idle
  };

  ListScheduler(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs, Rules rules)
      : stages_(stages), k_(k), costs_(costs), rules_(rules), forward_(forward_order(groups)), backward_(backward_order(forward_)) {
    int size = 0;
    for (const Item& i : forward_) size = std::max(size, i.micro_batch + 1);
    state_.resize(stages);
    for (State& s : state_) {
      s.output_at.assign(size, kNever);
      s.gradient_at.assign(size, kNever);
      s.formed.assign(size, false);
    }
  }

  Built run() {
    Built built{empty_schedule(stages_), 0};
    std::vector<StageList> lists;
    for (int s = 0; s < stages_; ++s) lists.emplace_back(built.schedule.stages[s], s, stages_);
    while (true) {
      Choice best;
      int at = -1;
      for (int s = 0; s < stages_; ++s) {
        const Choice c = choose(s);
        if (c.begin < best.begin) {
          best = c;
          at = s;
        }
      }
      if (at < 0) break;
      built.end_s = std::max(built.end_s, take(at, best, lists[at]));
    }
    return built;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct State {
    double free = 0;
    std::size_t next_forward = 0, next_backward = 0;
    int live = 0;                     ///< activations held, slots handed over included
    std::vector<double> output_at;    ///< [micro-batch] when this stage's output is at the next stage
    std::vector<double> gradient_at;  ///< [micro-batch] when this stage's gradient is at the stage before
    std::vector<bool> formed;         ///< [micro-batch] its activations are here
  };
  struct Choice {
    OpKind kind = OpKind::forward;
    double begin = kNever;
    Item item;
  };

  bool discarded(const Item& i) const { return i.chunk < i.chunks - k_; }

  Choice choose(int s) const {
    const State& state = state_[s];
    Choice best;
    const auto offer = [&](OpKind kind, double ready, const Item& item) {
      const double begin = std::max(state.free, ready);
      if (begin < best.begin) best = {kind, begin, item};
    };
    const bool room = state.live < k_ + stages_ - 1 - s;
    // In order of preference: an offer must begin strictly earlier to displace one before it.
    const Item* again = nullptr;
    if (state.next_backward < backward_.size()) {
      const Item& next = backward_[state.next_backward];
      if (state.formed[next.micro_batch])
        offer(OpKind::backward, s + 1 < stages_ ? state_[s + 1].gradient_at[next.micro_batch] : 0.0, next);
      else if (discarded(next) && !first_of_group(state.next_backward))
        again = &next;
    }
    if (again != nullptr && rules_.recompute_first) offer(OpKind::recompute, 0, *again);
    if (state.next_forward < forward_.size()) {
      const Item& next = forward_[state.next_forward];
      if (discarded(next) || room) offer(OpKind::forward, s > 0 ? state_[s - 1].output_at[next.micro_batch] : 0.0, next);
    }
    if (again != nullptr && !rules_.recompute_first) offer(OpKind::recompute, 0, *again);
    if (again == nullptr && rules_.early_recompute && room) {
      if (const Item* early = early_recompute(state); early != nullptr) offer(OpKind::recompute, 0, *early);
    }
    return best;
  }

  bool first_of_group(std::size_t backward_index) const { return backward_[backward_index].last(); }

  /// The first chunk not yet formed again of the group whose backward is next, once the group is forwarded.
  const Item* early_recompute(const State& state) const {
    if (state.next_backward >= backward_.size()) return nullptr;
    std::size_t b = state.next_backward;
    const std::size_t forwarded_end = b + static_cast<std::size_t>(backward_[b].chunk) + 1;  // both orders end a group at the same place
    if (state.next_forward < forwarded_end) return nullptr;
    for (; b < forwarded_end; ++b)
      if (!state.formed[backward_[b].micro_batch]) return &backward_[b];
    return nullptr;
  }

  double take(int s, const Choice& c, StageList& list) {
    State& state = state_[s];
    const int m = c.item.micro_batch;
    const auto transfer_s = [&](int to, Payload payload) {
      return to < 0 || to >= stages_ ? 0.0 : costs_.duration(s, {OpKind::send, m, c.item.chunk, to, payload});
    };
    const double end = c.begin + costs_.duration(s, {c.kind, m, c.item.chunk});
    switch (c.kind) {
      case OpKind::forward:
        list.forward(c.item);
        ++state.next_forward;
        if (!discarded(c.item)) {
          state.formed[m] = true;
          ++state.live;
        }
        state.output_at[m] = end + transfer_s(s + 1, Payload::activation);
        break;
      case OpKind::recompute: {
        list.recompute(c.item);
        const Item& next = backward_[state.next_backward];
        if (next.micro_batch != m) ++state.live;  // early: a slot of its own; else the one handed over
        state.formed[m] = true;
        break;
      }
      default: {
        list.backward(c.item);
        ++state.next_backward;
        state.formed[m] = false;
        const bool hand_over =
            c.item.chunk > 0 && discarded(backward_[state.next_backward]) && !state.formed[backward_[state.next_backward].micro_batch];
        if (!hand_over) --state.live;
        state.gradient_at[m] = end + transfer_s(s - 1, Payload::gradient);
        break;
      }
    }
    state.free = end;
    return end;
  }

  int stages_, k_;
  const ScheduleCosts& costs_;
  Rules rules_;
  std::vector<Item> forward_, backward_;
  std::vector<State> state_;
};

/// Seconds that no schedule can beat: some stage waits for its first input, works without a pause, and its last gradient goes home.
double least_time(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs) {
  const std::vector<Item> items = forward_order(groups);
  double least = 0, before = 0;
  for (int s = 0; s < stages; ++s) {
    double work = 0, first = std::numeric_limits<double>::infinity(), last = first;
    for (const Item& i : items) {
      const double forward = costs.duration(s, {OpKind::forward, i.micro_batch, i.chunk});
      const double backward = costs.duration(s, {OpKind::backward, i.micro_batch, i.chunk});
      work += forward + backward;
      if (i.chunk < i.chunks - k) work += costs.duration(s, {OpKind::recompute, i.micro_batch, i.chunk});
      first = std::min(first, forward);
      last = std::min(last, backward);
    }
    least = std::max(least, before + work);
    before += items.empty() ? 0 : first + last;
  }
  return least;
}

}  // namespace

ChunkGroups chunk_groups(const std::vector<MicroBatch>& list) {
  ChunkGroups groups;
  std::map<std::int64_t, std::pair<std::size_t, std::int64_t>> open;  // sample -> group, tokens so far
  for (int m = 0; m < static_cast<int>(list.size()); ++m) {
    const auto& segments = list[m].segments;
    if (segments.size() == 1 && segments[0].begin > 0) {
      const auto found = open.find(segments[0].sample);
      require(found != open.end() && found->second.second == segments[0].begin,
              "pipeline schedule: micro-batch {} begins at token {} of sample {}, and the chunk before it is not in the list", m,
              segments[0].begin, segments[0].sample);
      groups[found->second.first].push_back(m);
      found->second.second = segments[0].end;
      continue;
    }
    for (const Segment& s : segments)
      require(s.begin == 0, "pipeline schedule: micro-batch {} mixes a dependent chunk with other segments", m);
    if (segments.size() == 1) open[segments[0].sample] = {groups.size(), segments[0].end};
    groups.push_back({m});
  }
  return groups;
}

Schedule forward_schedule(const ChunkGroups& groups, int stages) {
  Schedule schedule = empty_schedule(stages);
  const std::vector<Item> order = forward_order(groups);
  for (int s = 0; s < stages; ++s) {
    StageList list(schedule.stages[s], s, stages);
    for (const Item& i : order) list.forward(i);
  }
  return schedule;
}

ScheduleCosts schedule_costs(const PipelineCosts& costs, const std::vector<MicroBatch>& list) {
  std::vector<double> forward, hop;
  for (const MicroBatch& m : list) {
    forward.push_back(costs.token_s * static_cast<double>(m.tokens()) + costs.pair_s * m.attention_pairs());
    hop.push_back(costs.hop_token_s * static_cast<double>(m.tokens()));
  }
  return {[forward, hop, backward = costs.backward_over_forward](int, const Op& op) {
    const auto m = static_cast<std::size_t>(op.micro_batch);
    switch (op.kind) {
      case OpKind::forward:
      case OpKind::recompute:
        return forward[m];
      case OpKind::backward:
        return backward * forward[m];
      case OpKind::send:
        return hop[m];
      default:
        return 0.0;
    }
  }};
}

Schedule with_offload(const Schedule& schedule) {
  Schedule result = schedule;
  for (std::size_t s = 1; s < schedule.stages.size(); ++s) {
    std::set<int> again;
    for (const Op& op : schedule.stages[s])
      if (op.kind == OpKind::recompute) again.insert(op.micro_batch);
    std::vector<Op>& list = result.stages[s];
    list.clear();
    for (const Op& op : schedule.stages[s]) {
      if (op.kind == OpKind::recompute) list.push_back({OpKind::fetch, op.micro_batch, op.chunk});
      list.push_back(op);
      if (op.kind == OpKind::forward && again.count(op.micro_batch) != 0) list.push_back({OpKind::offload, op.micro_batch, op.chunk});
    }
  }
  return result;
}

Schedule plan_schedule(const std::vector<MicroBatch>& list, const PipelineOptions& options) {
  const ChunkGroups groups = chunk_groups(list);
  const auto plan = [&] {
    if (options.schedule == "gpipe") return gpipe_schedule(groups, options.stages);
    if (options.schedule == "1f1b") return one_f_one_b_schedule(groups, options.stages);
    require(options.schedule == "state_aware_1f1b", "pipeline.schedule = \"{}\" is unknown", options.schedule);
    return state_aware_schedule(groups, options.stages, options.k, schedule_costs(options.costs, list), options.search);
  };
  return options.offload ? with_offload(plan()) : plan();
}

Schedule gpipe_schedule(const ChunkGroups& groups, int stages) {
  Schedule schedule = empty_schedule(stages);
  const std::vector<Item> order = forward_order(groups);
  for (int s = 0; s < stages; ++s) {
    StageList list(schedule.stages[s], s, stages);
    for (const Item& i : order) list.forward(i);
    for (auto i = order.rbegin(); i != order.rend(); ++i) list.backward(*i);
  }
  return schedule;
}

Schedule one_f_one_b_schedule(const ChunkGroups& groups, int stages) {
  Schedule schedule = empty_schedule(stages);
  const std::vector<Item> forward = forward_order(groups), backward = backward_order(forward);
  for (int s = 0; s < stages; ++s) {
    StageList list(schedule.stages[s], s, stages);
    std::size_t done = 0;
    for (std::size_t b = 0; b < backward.size(); ++b) {
      // The last stage forwards a whole group, then goes backward through it; a stage before it is P - 1 - s forwards ahead.
      const std::size_t group_end = b + static_cast<std::size_t>(backward[b].chunk) + 1;
      const std::size_t until = std::min(forward.size(), group_end + static_cast<std::size_t>(stages - 1 - s));
      while (done < until) list.forward(forward[done++]);
      list.backward(backward[b]);
    }
  }
  return schedule;
}

Schedule state_aware_schedule(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs, int search) {
  require(k >= 1, "pipeline schedule: k = {} chunks; must be at least 1", k);
  Built best{empty_schedule(stages), std::numeric_limits<double>::infinity()};
  const double least = least_time(groups, stages, k, costs);
  int tried = 0;
  const auto good_enough = [&] { return best.end_s <= least * (1 + 1e-12) || tried >= std::max(1, search); };
  const auto attempt = [&](const std::vector<std::size_t>& order) {
    ChunkGroups ordered;
    for (std::size_t g : order) ordered.push_back(groups[g]);
    bool better = false;
    for (const ListScheduler::Rules rules : {ListScheduler::Rules{true, true}, {true, false}, {false, true}, {false, false}}) {
      if (Built built = ListScheduler(ordered, stages, k, costs, rules).run(); built.end_s < best.end_s) {
        best = std::move(built);
        better = true;
      }
    }
    ++tried;
    return better;
  };

  std::vector<std::size_t> order(groups.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  attempt(order);
  if (groups.size() < 2) return std::move(best.schedule);
  std::vector<double> work(groups.size(), 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (int m : groups[g]) work[g] += costs.duration(0, {OpKind::forward, m}) + costs.duration(0, {OpKind::backward, m});
  std::vector<std::size_t> chosen = order;
  for (const bool longest_first : {true, false}) {
    if (good_enough()) return std::move(best.schedule);
    std::vector<std::size_t> sorted = order;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](std::size_t a, std::size_t b) { return longest_first ? work[a] > work[b] : work[a] < work[b]; });
    if (attempt(sorted)) chosen = sorted;
  }
  // Hill climbing: move one group elsewhere, keep what helps.
  for (std::uint64_t draw = 0; !good_enough(); ++draw) {
    std::vector<std::size_t> moved = chosen;
    const auto place = [&](std::uint64_t index, std::size_t n) {
      return static_cast<std::ptrdiff_t>(random_bits(0, stream_of("state_aware_schedule"), 2 * draw + index) % n);
    };
    const std::ptrdiff_t from = place(0, moved.size());
    const std::size_t group = moved[from];
    moved.erase(moved.begin() + from);
    moved.insert(moved.begin() + place(1, moved.size() + 1), group);
    if (attempt(moved)) chosen = moved;
  }
  return std::move(best.schedule);
}

}  // namespace ballast
