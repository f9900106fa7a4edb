// State-aware 1F1B and its zero-bubble variant: list scheduling of one order of samples, and the
// search over orders.
#include "core/plan/pipeline/state_aware_schedule.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/batch/chunk_groups.hpp"
#include "core/plan/pipeline/schedule_lists.hpp"

namespace ballast {
namespace {

using Item = ScheduleItem;

struct Built {
  Schedule schedule;
  double end_s = 0;
};

/// Halves with nothing between them are one op.
void join_halves(std::vector<Op>& ops) {
  std::vector<Op> joined;
  for (const Op& op : ops) {
    if (op.kind == OpKind::backward_weight && !joined.empty() &&
        joined.back() == Op{OpKind::backward_input, op.micro_batch, op.chunk})
      joined.back().kind = OpKind::backward;
    else
      joined.push_back(op);
  }
  ops = std::move(joined);
}

/// When a stage computes weight gradients.
enum class Weights {
  whole,    ///< as part of backward
  fill,     ///< where nothing else can begin
  patient,  ///< where nothing else can begin before they would be done
  lag,      ///< as with fill, but before the next forward where more of them wait than stages lie
            ///< before this one (as ZB-H1 does)
};

/// List scheduling of one order of groups; see the header.
class ListScheduler {
 public:
  struct Rules {
    bool recompute_first = true;  ///< where a recompute and a forward could both begin
    bool early_recompute = true;  ///< a recompute may take a free slot before its turn, in time
                                  ///< that the stage would idle
    Weights weights = Weights::whole;
  };

  ListScheduler(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs,
                Rules rules)
      : stages_(stages),
        k_(k),
        costs_(costs),
        rules_(rules),
        forward_(forward_order(groups)),
        backward_(backward_order(forward_)) {
    int size = 0;
    for (const Item& i : forward_) size = std::max(size, i.micro_batch + 1);
    state_.resize(stages);
    for (State& s : state_) {
      s.output_at.assign(size, kNever);
      s.gradient_at.assign(size, kNever);
      s.present.assign(size, false);
    }
  }

  Built run() {
    Built built{empty_schedule(stages_), 0};
    std::vector<StageList> lists;
    for (int s = 0; s < stages_; ++s) lists.emplace_back(built.schedule.stages[s], s, stages_);
    // A stage's choice depends on itself and its neighbours alone.
    std::vector<Choice> choices;
    for (int s = 0; s < stages_; ++s) choices.push_back(choose(s));
    while (true) {
      const auto first =
          std::min_element(choices.begin(), choices.end(),
                           [](const Choice& a, const Choice& b) { return a.begin < b.begin; });
      if (first->begin == kNever) break;
      const int at = static_cast<int>(first - choices.begin());
      built.end_s = std::max(built.end_s, take(at, *first, lists[at]));
      for (int s = std::max(0, at - 1); s < std::min(stages_, at + 2); ++s) choices[s] = choose(s);
    }
    for (auto& ops : built.schedule.stages) join_halves(ops);
    return built;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct State {
    double free = 0;
    std::size_t next_forward = 0, next_backward = 0;
    int live = 0;  ///< micro-batches between forward (or recompute) and the end of their backward
    std::deque<Item> weights;  ///< whose weight gradients are still to be computed, in the order of
                               ///< their backward
    std::vector<double> output_at;  ///< [micro-batch] when this stage's output is at the next stage
    std::vector<double>
        gradient_at;            ///< [micro-batch] when this stage's gradient is at the stage before
    std::vector<bool> present;  ///< [micro-batch] its activations are here
  };
  struct Choice {
    OpKind kind = OpKind::forward;
    double begin = kNever;
    Item item;
  };

  bool split() const { return rules_.weights != Weights::whole; }
  bool discarded(const Item& i) const { return i.chunk < i.chunks - k_; }

  Choice choose(int s) const {
    const State& state = state_[s];
    Choice best;
    const auto offer = [&](OpKind kind, double ready, const Item& item) {
      const double begin = std::max(state.free, ready);
      if (begin < best.begin) best = {kind, begin, item};
    };
    // In order of preference: an offer must begin strictly earlier to displace one before it.
    const Item* again = nullptr;
    if (state.next_backward < backward_.size()) {
      const Item& next = backward_[state.next_backward];
      if (state.present[next.micro_batch]) {
        if (may_send(s, Payload::gradient))
          offer(split() ? OpKind::backward_input : OpKind::backward,
                s + 1 < stages_ ? state_[s + 1].gradient_at[next.micro_batch] : 0.0, next);
      } else if (discarded(next) && !first_of_group(state.next_backward))
        again = &next;
    }
    // A group that is on its way back gets the last slot, so that it goes on whatever the forwards
    // do.
    const bool room = fits(s, again != nullptr ? 1 : 0);
    if (again != nullptr && !fits(s, 0)) again = nullptr;  // until weight gradients have made room
    if (again != nullptr && rules_.recompute_first) offer(OpKind::recompute, 0, *again);
    if (rules_.weights == Weights::lag && static_cast<int>(state.weights.size()) > s)
      offer(OpKind::backward_weight, 0, state.weights.front());
    if (state.next_forward < forward_.size()) {
      const Item& next = forward_[state.next_forward];
      if ((discarded(next) || room) && may_send(s, Payload::activation))
        offer(OpKind::forward, s > 0 ? state_[s - 1].output_at[next.micro_batch] : 0.0, next);
    }
    if (again != nullptr && !rules_.recompute_first) offer(OpKind::recompute, 0, *again);
    if (again == nullptr && rules_.early_recompute && room) {
      if (const Item* early = early_recompute(state); early != nullptr)
        offer(OpKind::recompute, 0, *early);
    }
    if (!state.weights.empty()) {
      const Item& next = state.weights.front();
      const double end =
          state.free + costs_.duration(s, {OpKind::backward_weight, next.micro_batch, next.chunk});
      if (rules_.weights != Weights::patient || end <= best.begin)
        offer(OpKind::backward_weight, 0, next);
    }
    return best;
  }

  /// Whether the neighbour has begun to receive enough for one more message: a host that waits to
  /// send receives nothing, and two that wait for each other wait for ever.  Some stage can always
  /// go on: the first sends no gradients, and its live slots reach the group on its way back.
  bool may_send(int s, Payload payload) const {
    if (payload == Payload::activation)
      return s + 1 == stages_ ||
             state_[s].next_forward - state_[s + 1].next_forward < kTransfersAhead;
    return s == 0 || state_[s].next_backward - state_[s - 1].next_backward < kTransfersAhead;
  }
  /// Whether stage s may hold one more micro-batch's activations beside what it has and `reserved`.
  bool fits(int s, int reserved) const {
    const int whole = state_[s].live - static_cast<int>(state_[s].weights.size());
    return whole + reserved < k_ + stages_ - 1 - s && state_[s].live + reserved < k_ + stages_ - 1;
  }
  bool first_of_group(std::size_t backward_index) const { return backward_[backward_index].last(); }

  /// The first chunk not yet recomputed of the group whose backward is next, once the group is
  /// forwarded.
  const Item* early_recompute(const State& state) const {
    if (state.next_backward >= backward_.size()) return nullptr;
    std::size_t b = state.next_backward;
    const std::size_t forwarded_end = b + static_cast<std::size_t>(backward_[b].chunk) +
                                      1;  // both orders end a group at the same place
    if (state.next_forward < forwarded_end) return nullptr;
    for (; b < forwarded_end; ++b)
      if (!state.present[backward_[b].micro_batch]) return &backward_[b];
    return nullptr;
  }

  double take(int s, const Choice& c, StageList& list) {
    State& state = state_[s];
    const int m = c.item.micro_batch;
    const auto transfer_s = [&](int to, Payload payload) {
      return to < 0 || to >= stages_
                 ? 0.0
                 : costs_.duration(s, {OpKind::send, m, c.item.chunk, to, payload});
    };
    const double end = c.begin + costs_.duration(s, {c.kind, m, c.item.chunk});
    switch (c.kind) {
      case OpKind::forward:
        list.forward(c.item);
        ++state.next_forward;
        if (!discarded(c.item)) {
          state.present[m] = true;
          ++state.live;
        }
        state.output_at[m] = end + transfer_s(s + 1, Payload::activation);
        break;
      case OpKind::recompute:
        list.recompute(c.item);
        state.present[m] = true;
        ++state.live;
        break;
      case OpKind::backward_weight:
        list.weights(c.item);
        state.weights.pop_front();
        --state.live;
        break;
      default:
        list.backward(c.item, c.kind);
        ++state.next_backward;
        state.present[m] = false;
        if (split())
          state.weights.push_back(c.item);
        else
          --state.live;
        state.gradient_at[m] = end + transfer_s(s - 1, Payload::gradient);
        break;
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

/// List entries that a search may make before it keeps what it has: below a second on one core,
/// whatever the batch.
constexpr std::int64_t kMostEntries = 4'000'000;

/// Seconds that no schedule can beat: some stage waits for its first input, works without a pause,
/// and its last gradient goes home.
double least_time(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs,
                  bool split) {
  const std::vector<Item> items = forward_order(groups);
  double least = 0, before = 0;
  for (int s = 0; s < stages; ++s) {
    double work = 0, first = std::numeric_limits<double>::infinity(), last = first;
    for (const Item& i : items) {
      const double forward = costs.duration(s, {OpKind::forward, i.micro_batch, i.chunk});
      const double backward = costs.duration(s, {OpKind::backward, i.micro_batch, i.chunk});
      work += forward + backward;
      if (i.chunk < i.chunks - k)
        work += costs.duration(s, {OpKind::recompute, i.micro_batch, i.chunk});
      first = std::min(first, forward);
      last =
          std::min(last, split ? costs.duration(s, {OpKind::backward_input, i.micro_batch, i.chunk})
                               : backward);
    }
    least = std::max(least, before + work);
    before += items.empty() ? 0 : first + last;
  }
  return least;
}

/// The rules that list scheduling is tried with: those of weight gradients where backward is split,
/// those of recomputation where a group is recomputed.
std::vector<ListScheduler::Rules> rules_for(bool split, bool recompute) {
  std::vector<ListScheduler::Rules> rules;
  for (const Weights weights : {Weights::whole, Weights::fill, Weights::patient, Weights::lag})
    for (const auto& [recompute_first, early] :
         {std::pair{true, true}, {true, false}, {false, true}, {false, false}})
      if ((split || weights == Weights::whole) && (recompute || (recompute_first && early)))
        rules.push_back({recompute_first, early, weights});
  return rules;
}

/// Search over the order of groups for the shortest step.
class OrderSearch {
 public:
  OrderSearch(const ChunkGroups& groups, int stages, int k, const ScheduleCosts& costs, int search,
              bool split)
      : groups_(groups),
        stages_(stages),
        k_(k),
        costs_(costs),
        most_orders_(std::max(1, search)),
        split_(split && stages > 1),  // one stage keeps nobody waiting
        least_(least_time(groups, stages, k, costs, split_)),
        best_{empty_schedule(stages), std::numeric_limits<double>::infinity()} {
    bool recompute = false;
    std::int64_t size = 0;
    for (const auto& group : groups) {
      recompute = recompute || static_cast<int>(group.size()) > k;
      size += static_cast<std::int64_t>(group.size());
    }
    rules_ = rules_for(split_, recompute);
    entries_of_a_list_ = (split_ ? 3 : 2) * size * stages;
  }

  Schedule best() {
    std::vector<std::size_t> order(groups_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    attempt(order);
    if (groups_.size() >= 2) climb(sorted_by_work(order));
    return std::move(best_.schedule);
  }

 private:
  using Order = std::vector<std::size_t>;

  bool good_enough() const {
    return best_.end_s <= least_ * (1 + 1e-12) || tried_ >= most_orders_ || entries_ > kMostEntries;
  }

  /// Whether the order gives a shorter step than all before it.
  bool attempt(const Order& order) {
    ChunkGroups ordered;
    for (std::size_t g : order) ordered.push_back(groups_[g]);
    bool better = false;
    for (const ListScheduler::Rules& r : rules_) {
      entries_ += entries_of_a_list_;
      if (Built built = ListScheduler(ordered, stages_, k_, costs_, r).run();
          built.end_s < best_.end_s) {
        best_ = std::move(built);
        better = true;
      }
    }
    ++tried_;
    return better;
  }

  /// Tries the longest group first and the longest last; returns the best order so far.
  Order sorted_by_work(const Order& order) {
    std::vector<double> work(groups_.size(), 0);
    for (std::size_t g = 0; g < groups_.size(); ++g)
      for (int m : groups_[g])
        work[g] +=
            costs_.duration(0, {OpKind::forward, m}) + costs_.duration(0, {OpKind::backward, m});
    Order chosen = order;
    for (const bool longest_first : {true, false}) {
      if (good_enough()) break;
      Order sorted = order;
      std::stable_sort(sorted.begin(), sorted.end(), [&](std::size_t a, std::size_t b) {
        return longest_first ? work[a] > work[b] : work[a] < work[b];
      });
      if (attempt(sorted)) chosen = sorted;
    }
    return chosen;
  }

  /// Hill climbing: moves one group elsewhere, keeps what helps.
  void climb(Order chosen) {
    for (std::uint64_t draw = 0; !good_enough(); ++draw) {
      Order moved = chosen;
      const auto place = [&](std::uint64_t index, std::size_t n) {
        return static_cast<std::ptrdiff_t>(
            random_bits(0, stream_of("state_aware_schedule"), 2 * draw + index) % n);
      };
      const std::ptrdiff_t from = place(0, moved.size());
      const std::size_t group = moved[from];
      moved.erase(moved.begin() + from);
      moved.insert(moved.begin() + place(1, moved.size() + 1), group);
      if (attempt(moved)) chosen = moved;
    }
  }

  const ChunkGroups& groups_;
  int stages_, k_;
  const ScheduleCosts& costs_;
  int most_orders_;
  bool split_;
  double least_;
  Built best_;
  std::vector<ListScheduler::Rules> rules_;
  int tried_ = 0;
  std::int64_t entries_of_a_list_ = 0, entries_ = 0;
};

}  // namespace

Schedule state_aware_schedule(const ChunkGroups& groups, int stages, int k,
                              const ScheduleCosts& costs, int search, bool split) {
  require(k >= 1, "pipeline schedule: k = {} chunks; must be at least 1", k);
  return OrderSearch(groups, stages, k, costs, search, split).best();
}

}  // namespace ballast
