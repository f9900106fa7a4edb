#include "core/plan/pipeline/list_scheduler.hpp"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

/// Above the rounding of sums of seconds: a bound beyond it is no tie.
constexpr double kClearlyMore = 1 + 1e-9;

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

/// Adds an op to a stage's list, with its transfers.
void put(OpKind kind, const ScheduleItem& item, StageList& list) {
  switch (kind) {
    case OpKind::forward:
      return list.forward(item);
    case OpKind::recompute:
      return list.recompute(item);
    case OpKind::backward_weight:
      return list.weights(item);
    default:
      return list.backward(item, kind);
  }
}

/// Place of the least of eight values, the lowest of several; without branches, which would be coin
/// tosses.
std::size_t earliest_of(const double* values) {
  const auto least = [values](std::size_t a, std::size_t b) {
    return values[b] < values[a] ? b : a;
  };
  return least(least(least(0, 1), least(2, 3)), least(least(4, 5), least(6, 7)));
}

int micro_batches(const ChunkGroups& groups) {
  int size = 0;
  for (const auto& group : groups)
    for (const int m : group) size = std::max(size, m + 1);
  return size;
}

}  // namespace

OpDurations::OpDurations(const ChunkGroups& groups, int stages, const ScheduleCosts& costs)
    : size_(micro_batches(groups)),
      seconds_(static_cast<std::size_t>(stages) * kKinds * static_cast<std::size_t>(size_)) {
  static_assert(static_cast<int>(OpKind::backward_weight) == kKinds - 3);
  const std::vector<ScheduleItem> items = forward_order(groups);
  for (int s = 0; s < stages; ++s) {
    const auto row = [&](int kind) {
      return seconds_.begin() + static_cast<std::ptrdiff_t>(s * kKinds + kind) * size_;
    };
    for (const ScheduleItem& i : items) {
      const int m = i.micro_batch;
      for (int kind = 0; kind < kKinds - 2; ++kind)
        row(kind)[m] = costs.duration(s, {static_cast<OpKind>(kind), m, i.chunk});
      if (s + 1 < stages)
        row(5)[m] = costs.duration(s, {OpKind::send, m, i.chunk, s + 1, Payload::activation});
      if (s > 0)
        row(6)[m] = costs.duration(s, {OpKind::send, m, i.chunk, s - 1, Payload::gradient});
    }
  }
}

ListScheduler::ListScheduler(const ChunkGroups& groups, int stages, int k,
                             const ScheduleCosts& costs)
    : groups_(groups),
      stages_(stages),
      k_(k),
      size_(micro_batches(groups)),
      durations_(groups, stages, costs),
      state_(static_cast<std::size_t>(stages)),
      choices_(static_cast<std::size_t>(stages)) {
  const int eights = (stages + kEight - 1) / kEight;
  begins_.assign(static_cast<std::size_t>(eights * kEight), kNever);
  earliest_.assign(static_cast<std::size_t>((eights + kEight - 1) / kEight * kEight), kNever);
}

double ListScheduler::end_s(const Order& order, const ListRules& rules, double limit_s) {
  reset(order, rules);
  return run(limit_s * kClearlyMore, nullptr);
}

Schedule ListScheduler::schedule(const Order& order, const ListRules& rules) {
  reset(order, rules);
  Schedule schedule = empty_schedule(stages_);
  std::vector<StageList> lists;
  for (int s = 0; s < stages_; ++s)
    lists.emplace_back(schedule.stages[static_cast<std::size_t>(s)], s, stages_);
  run(kNever, &lists);
  for (auto& ops : schedule.stages) join_halves(ops);
  return schedule;
}

double ListScheduler::least_s(bool split) const {
  double least = 0, first_input = 0, way_home = 0;
  const std::vector<ScheduleItem> items = forward_order(groups_);
  const OpKind back = split ? OpKind::backward_input : OpKind::backward;
  for (int s = 0; s < stages_; ++s) {
    double chain = 0, weights = 0, first = kNever, last = kNever;
    for (const ScheduleItem& i : items) {
      const double forward = durations_.op(s, OpKind::forward, i.micro_batch),
                   backward = durations_.op(s, back, i.micro_batch);
      chain += forward + backward;
      if (discarded(i)) chain += durations_.op(s, OpKind::recompute, i.micro_batch);
      if (split) weights += durations_.op(s, OpKind::backward_weight, i.micro_batch);
      first = std::min(first, forward);
      last = std::min(last, backward);
    }
    // Weight halves may follow the gradient that goes home.
    least = std::max(least, first_input + chain + std::max(weights, way_home));
    if (items.empty()) continue;
    first_input += first, way_home += last;
  }
  return least;
}

void ListScheduler::reset(const Order& order, const ListRules& rules) {
  rules_ = rules;
  ChunkGroups ordered;
  for (const std::size_t g : order) ordered.push_back(groups_[g]);
  forward_ = forward_order(ordered);
  backward_ = backward_order(forward_);
  state_.assign(static_cast<std::size_t>(stages_), {});
  progress_.assign(static_cast<std::size_t>(stages_ * size_), {});
  lay_out_work();
}

void ListScheduler::lay_out_work() {
  double home = 0;  // of the last gradient, from here to the first stage
  for (int s = 0; s < stages_; ++s) {
    State& state = state_[static_cast<std::size_t>(s)];
    const OpKind back = rules_.split() ? OpKind::backward_input : OpKind::backward;
    double shortest = kNever, weights = 0;
    state.way_home = 0;
    for (const ScheduleItem& i : forward_) {
      const double backward = durations_.op(s, back, i.micro_batch);
      shortest = std::min(shortest, backward);
      state.way_home += durations_.op(s, OpKind::forward, i.micro_batch) + backward;
      if (discarded(i)) state.way_home += durations_.op(s, OpKind::recompute, i.micro_batch);
      if (rules_.split()) weights += durations_.op(s, OpKind::backward_weight, i.micro_batch);
    }
    state.work = state.way_home + weights;
    state.way_home += home;
    if (!forward_.empty()) home += shortest;
  }
}

double ListScheduler::run(double limit_s, std::vector<StageList>* lists) {
  // A stage's choice depends on itself and its neighbours alone.
  for (int s = 0; s < stages_; ++s) choose(s);
  for (std::size_t e = 0; e * kEight < begins_.size(); ++e)
    earliest_[e] = begins_[e * kEight + earliest_of(&begins_[e * kEight])];
  double end = 0;
  for (;;) {
    const int at = first_to_begin();
    if (begins_[static_cast<std::size_t>(at)] == kNever) break;
    const Choice choice = choices_[static_cast<std::size_t>(at)];
    if (lists != nullptr) put(choice.kind, *choice.item, (*lists)[static_cast<std::size_t>(at)]);
    end = std::max(end, take(at, choice));
    if (least_end(at, choice.kind) > limit_s) return kNever;
    choose_again(at, choice.kind);
  }
  return end;
}

/// A bound on the end of all, after an op of this stage.
double ListScheduler::least_end(int stage, OpKind taken) const {
  const State& own = state(stage);
  // The last gradient may have left before a weight half.
  const double left =
      taken == OpKind::backward_weight ? own.work : std::max(own.work, own.way_home);
  return own.free + left;
}

/// The stage whose choice begins first, the lowest of several.
int ListScheduler::first_to_begin() const {
  std::size_t first = earliest_of(earliest_.data());
  for (std::size_t e = kEight; e < earliest_.size(); e += kEight)
    if (const std::size_t at = e + earliest_of(&earliest_[e]); earliest_[at] < earliest_[first])
      first = at;
  return static_cast<int>(first * kEight + earliest_of(&begins_[first * kEight]));
}

/// After an op of this stage: the stage itself and those whose choice the op can have changed, the
/// one that waited for what it made, and the one that could not send before this stage received.
void ListScheduler::choose_again(int stage, OpKind taken) {
  int first = stage, last = stage;
  const auto again = [&](int s) {
    choose(s);
    first = std::min(first, s), last = std::max(last, s);
  };
  again(stage);
  if (taken != OpKind::recompute && taken != OpKind::backward_weight) {
    const bool forward = taken == OpKind::forward;
    const int waits = forward ? stage + 1 : stage - 1, sends = forward ? stage - 1 : stage + 1;
    const auto next = [&](int s) {
      return forward ? state(s).next_forward : state(s).next_backward;
    };
    if (waits >= 0 && waits < stages_ && next(waits) + 1 == next(stage)) again(waits);
    if (sends >= 0 && sends < stages_ && next(sends) + 1 == next(stage) + kTransfersAhead)
      again(sends);
  }
  for (auto e = static_cast<std::size_t>(first / kEight);
       e <= static_cast<std::size_t>(last / kEight); ++e)
    earliest_[e] = begins_[e * kEight + earliest_of(&begins_[e * kEight])];
}

void ListScheduler::choose(int s) {
  const State& own = state(s);
  double first = kNever;
  OpKind chosen = OpKind::forward;
  const ScheduleItem* of = nullptr;
  const auto offer = [&](OpKind kind, double ready, const ScheduleItem& item) {
    const double begin = std::max(own.free, ready);
    if (begin < first) first = begin, chosen = kind, of = &item;
  };
  // In order of preference: an offer must begin strictly earlier to displace one before it.
  const ScheduleItem* again = nullptr;
  if (own.next_backward < backward_.size()) {
    const ScheduleItem& next = backward_[own.next_backward];
    if (progress(s, next.micro_batch).present) {
      if (may_send(s, Payload::gradient))
        offer(rules_.split() ? OpKind::backward_input : OpKind::backward,
              s + 1 < stages_ ? progress(s + 1, next.micro_batch).gradient_at : 0.0, next);
    } else if (discarded(next) && !next.last()) {
      again = &next;
    }
  }
  // A group that is on its way back gets the last slot, so that it goes on whatever the forwards
  // do.
  const bool room = fits(s, again != nullptr ? 1 : 0);
  if (again != nullptr && !fits(s, 0)) again = nullptr;  // until weight gradients have made room
  if (again != nullptr && rules_.recompute_first) offer(OpKind::recompute, 0, *again);
  if (rules_.weights == WeightHalves::lag && static_cast<int>(own.halves()) > s)
    offer(OpKind::backward_weight, 0, backward_[own.next_weight]);
  if (own.next_forward < forward_.size()) {
    const ScheduleItem& next = forward_[own.next_forward];
    if ((discarded(next) || room) && may_send(s, Payload::activation))
      offer(OpKind::forward, s > 0 ? progress(s - 1, next.micro_batch).output_at : 0.0, next);
  }
  if (again != nullptr && !rules_.recompute_first) offer(OpKind::recompute, 0, *again);
  if (again == nullptr && rules_.early_recompute && room) {
    if (const ScheduleItem* early = early_recompute(s); early != nullptr)
      offer(OpKind::recompute, 0, *early);
  }
  if (own.halves() > 0) {
    const ScheduleItem& next = backward_[own.next_weight];
    const double end = own.free + durations_.op(s, OpKind::backward_weight, next.micro_batch);
    if (rules_.weights != WeightHalves::patient || end <= first)
      offer(OpKind::backward_weight, 0, next);
  }
  begins_[static_cast<std::size_t>(s)] = first;
  choices_[static_cast<std::size_t>(s)] = {chosen, of};
}

/// Whether the neighbour has begun to receive enough for one more message: a host that waits to
/// send receives nothing, and two that wait for each other wait for ever.  Some stage can always
/// go on: the first sends no gradients, and its live slots reach the group on its way back.
bool ListScheduler::may_send(int s, Payload payload) const {
  if (payload == Payload::activation)
    return s + 1 == stages_ || state(s).next_forward - state(s + 1).next_forward < kTransfersAhead;
  return s == 0 || state(s).next_backward - state(s - 1).next_backward < kTransfersAhead;
}

/// Whether stage s may hold one more micro-batch's activations beside what it has and `reserved`.
bool ListScheduler::fits(int s, int reserved) const {
  const int live = state(s).live, whole = live - static_cast<int>(state(s).halves());
  return whole + reserved < k_ + stages_ - 1 - s && live + reserved < k_ + stages_ - 1;
}

/// The first chunk not yet recomputed of the group whose backward is next, once the group is
/// forwarded.
const ScheduleItem* ListScheduler::early_recompute(int s) const {
  std::size_t b = state(s).next_backward;
  if (b >= backward_.size()) return nullptr;
  const std::size_t forwarded_end = b + static_cast<std::size_t>(backward_[b].chunk) +
                                    1;  // both orders end a group at the same place
  if (state(s).next_forward < forwarded_end) return nullptr;
  for (; b < forwarded_end; ++b)
    if (!progress(s, backward_[b].micro_batch).present) return &backward_[b];
  return nullptr;
}

double ListScheduler::take(int s, const Choice& choice) {
  State& state = state_[static_cast<std::size_t>(s)];
  const int micro_batch = choice.item->micro_batch;
  Progress& own = progress_[static_cast<std::size_t>(s * size_ + micro_batch)];
  const double seconds = durations_.op(s, choice.kind, micro_batch),
               end = begins_[static_cast<std::size_t>(s)] + seconds;
  switch (choice.kind) {
    case OpKind::forward:
      ++state.next_forward;
      if (!discarded(*choice.item)) {
        own.present = true;
        ++state.live;
      }
      own.output_at = end + durations_.output_transfer(s, micro_batch);
      break;
    case OpKind::recompute:
      own.present = true;
      ++state.live;
      break;
    case OpKind::backward_weight:
      ++state.next_weight;
      --state.live;
      break;
    default:
      ++state.next_backward;
      own.present = false;
      if (!rules_.split()) ++state.next_weight, --state.live;
      own.gradient_at = end + durations_.gradient_transfer(s, micro_batch);
      break;
  }
  state.free = end;
  state.work -= seconds;
  if (choice.kind != OpKind::backward_weight) state.way_home -= seconds;
  return end;
}

}  // namespace ballast
