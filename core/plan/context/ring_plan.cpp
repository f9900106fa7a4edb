#include "core/plan/context/ring_plan.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "core/base/error.hpp"
#include "core/base/hash.hpp"

namespace ballast {
namespace {

int wrap(int value, int size) { return ((value % size) + size) % size; }

/// The rank's place on the two rings, and which shard is where.
struct Rings {
  int node, place, outer, inner;
  int rank(int n, int i) const { return wrap(n, outer) * inner + wrap(i, inner); }
  /// Shard computed at outer step o, inner step j: the node holds the shards of node - o.
  int shard(int o, int j) const { return rank(node - o, place - j); }
  RingHop on_inner(int send_shard, int recv_shard, int complete) const {
    return {RingLevel::inner, rank(node, place + 1), rank(node, place - 1), send_shard, recv_shard,
            complete};
  }
  RingHop on_outer(int send_shard, int recv_shard, int complete) const {
    return {RingLevel::outer, rank(node + 1, place), rank(node - 1, place), send_shard, recv_shard,
            complete};
  }
};

std::vector<RingStep> kv_steps(const Rings& r) {
  std::vector<RingStep> steps;
  for (int o = 0; o < r.outer; ++o) {
    for (int j = 0; j < r.inner; ++j) {
      const int t = o * r.inner + j;
      const bool last_inner = j == r.inner - 1, last_outer = o == r.outer - 1;
      RingStep step;
      step.outer = o;
      step.inner = j;
      step.shard = r.shard(o, j);
      if (!last_inner) step.kv_inner = r.on_inner(r.shard(o, j), r.shard(o, j + 1), t);
      if (j == 0 && !last_outer)
        step.kv_outer = r.on_outer(r.shard(o, 0), r.shard(o + 1, 0), t + r.inner - 1);
      // The shard an outer step enters with stays while it travels on; own shards (o == 0, j == 0)
      // always stay.
      if (j > 0 || (o > 0 && last_outer)) step.release.push_back(step.shard);
      if (last_inner && !last_outer && o > 0) step.release.push_back(r.shard(o, 0));
      steps.push_back(std::move(step));
    }
  }
  return steps;
}

std::vector<RingStep> backward_steps(const Rings& r) {
  std::vector<RingStep> steps = kv_steps(r);
  if (steps.size() == 1) return steps;
  const bool two_levels = r.inner > 1;
  steps.front().shard = -1;  // the own shard: at the end
  for (int o = 0; o < r.outer; ++o) {
    for (int j = 0; j < r.inner; ++j) {
      const int t = o * r.inner + j;
      RingStep& step = steps[t];
      // The partial of the rank that entered with a shard waits there for the others' sum, which so
      // has a hop less to go: it begins at the next rank, and likewise the sum over the nodes at
      // the next node.
      if (j > 1) step.dkv_inner = r.on_inner(r.shard(o, j - 1), r.shard(o, j), t);
      // The node's sums of outer step o - 1 end their turn here ...
      if (j == 0 && o > 0 && two_levels)
        step.dkv_inner = r.on_inner(r.shard(o - 1, r.inner - 1), r.shard(o - 1, 0), t);
      // ... meet the sum that arrives from the nodes before, and travel on from the next step.  The
      // receiver's own share of that shard is whole only at its next outer step, so the hop has a
      // whole turn of the inner ring.
      if (o > 1 && j == (two_levels ? 1 : 0))
        step.dkv_outer =
            r.on_outer(r.shard(o - 1, 0), r.shard(o, 0), two_levels ? (o + 1) * r.inner : t);
    }
  }
  // Epilogue: the hops home, the last of them beside the own shard.
  const auto add_step = [&]() -> RingStep& {
    RingStep step;
    step.outer = r.outer;
    step.inner = static_cast<int>(steps.size()) - r.outer * r.inner;
    return steps.emplace_back(step);
  };
  const int t = static_cast<int>(steps.size());
  if (r.inner > 1)
    add_step().dkv_inner =
        r.on_inner(r.shard(r.outer - 1, r.inner - 1), r.shard(r.outer - 1, 0), t);
  if (r.outer > 1)
    add_step().dkv_outer =
        r.on_outer(r.shard(r.outer - 1, 0), r.shard(r.outer, 0), two_levels ? t + 1 : t);
  steps.back().shard = r.shard(0, 0);
  return steps;
}

/// Buffers alive at once on one rank, at most.
struct MostBuffers {
  std::size_t sums = 0;    ///< dKV
  std::size_t of_all = 0;  ///< dKV and KV
};
MostBuffers most_buffers(int rank, const std::vector<RingStep>& steps) {
  std::set<int> kv{rank}, held;
  std::vector<RingHop> kv_flights, flights;
  MostBuffers most;
  for (std::size_t t = 0; t < steps.size(); ++t) {
    const RingStep& step = steps[t];
    for (const auto* hop : {&step.kv_inner, &step.kv_outer})
      if (*hop) kv_flights.push_back(**hop);
    for (const auto* hop : {&step.dkv_inner, &step.dkv_outer})
      if (*hop) {
        held.erase((*hop)->send_shard);
        flights.push_back(**hop);
      }
    if (step.shard >= 0) held.insert(step.shard);
    const std::size_t sums = held.size() + 2 * flights.size();  // one leaves, one arrives
    most.sums = std::max(most.sums, sums);
    most.of_all = std::max(most.of_all, sums + kv.size() + kv_flights.size());
    const auto arrive = [t](std::vector<RingHop>& list, std::set<int>& to) {
      std::erase_if(list, [&](const RingHop& hop) {
        const bool ends = hop.complete == static_cast<int>(t);
        if (ends) to.insert(hop.recv_shard);
        return ends;
      });
    };
    arrive(kv_flights, kv);
    arrive(flights, held);
    for (const int shard : step.release) kv.erase(shard);
  }
  return most;
}

enum Kind { kKvInner, kKvOuter, kDkvInner, kDkvOuter, kKinds };
const std::optional<RingHop>& hop(const RingStep& step, int kind) {
  const std::optional<RingHop>* hops[kKinds] = {&step.kv_inner, &step.kv_outer, &step.dkv_inner,
                                                &step.dkv_outer};
  return *hops[kind];
}
constexpr const char* kKindName[kKinds] = {"KV inner", "KV outer", "dKV inner", "dKV outer"};

using Contributions = std::multiset<int>;

/// State of one rank while its list is replayed.  A KV shard is a token; a dKV sum is the multiset
/// of ranks in it.
struct Replica {
  struct Flight {
    RingHop hop;
    Contributions sum;  ///< what arrives
  };
  std::set<int> kv;
  std::map<int, Contributions> accumulators;
  std::optional<Flight> in_flight[kKinds];
  std::map<int, int> computed;
  int kv_peak = 0, dkv_peak = 0;

  void note_peaks() {
    int kv_now = static_cast<int>(kv.size()) - 1, dkv_now = static_cast<int>(accumulators.size());
    for (int kind : {kKvInner, kKvOuter}) kv_now += in_flight[kind].has_value();
    for (int kind : {kDkvInner, kDkvOuter})
      dkv_now += in_flight[kind] ? 2 : 0;  // one leaves, one arrives
    kv_peak = std::max(kv_peak, kv_now);
    dkv_peak = std::max(dkv_peak, dkv_now);
  }
};

/// Replays one direction on all ranks in lockstep.
class Replay {
 public:
  Replay(const std::vector<RingPlan>& plans, bool backward)
      : plans_(plans),
        backward_(backward),
        ranks_(static_cast<int>(plans.size())),
        state_(plans.size()) {
    for (int r = 0; r < ranks_; ++r) state_[r].kv = {r};
  }

  std::string run() {
    const int count = static_cast<int>(steps(0).size());
    for (int r = 0; r < ranks_; ++r)
      if (static_cast<int>(steps(r).size()) != count)
        return fmt::format("rank {} has {} steps, rank 0 has {}", r, steps(r).size(), count);
    for (int t = 0; t < count && wrong_.empty(); ++t) {
      for (int kind = 0; kind < kKinds; ++kind) post(t, kind);
      for (int r = 0; r < ranks_ && wrong_.empty(); ++r) finish(r, t);
    }
    for (int r = 0; r < ranks_ && wrong_.empty(); ++r) check_end(r);
    return wrong_;
  }

 private:
  const std::vector<RingStep>& steps(int r) const {
    return backward_ ? plans_[r].backward : plans_[r].forward;
  }
  template <class... Args>
  void wrong(int r, int t, fmt::format_string<Args...> format, Args&&... args) {
    if (wrong_.empty())
      wrong_ = fmt::format("rank {}, step {}: ", r, t) +
               fmt::format(format, std::forward<Args>(args)...);
  }
  bool is_shard(int s) const { return s >= 0 && s < ranks_; }

  /// Posts the hops of one kind on all ranks: all sends are taken before any arrives.
  void post(int t, int kind) {
    const bool dkv = kind == kDkvInner || kind == kDkvOuter;
    std::vector<Contributions> sent(ranks_);
    for (int r = 0; r < ranks_; ++r) {
      const auto& h = hop(steps(r)[t], kind);
      if (!h) continue;
      if (dkv && !backward_) return wrong(r, t, "a dKV hop in forward");
      if ((h->level == RingLevel::outer) != (kind == kKvOuter || kind == kDkvOuter))
        return wrong(r, t, "{} hop names the other level", kKindName[kind]);
      if (!is_shard(h->to) || !is_shard(h->from) || !is_shard(h->send_shard) ||
          !is_shard(h->recv_shard))
        return wrong(r, t, "{} hop names a rank or shard outside [0, {})", kKindName[kind], ranks_);
      if (h->complete < t || h->complete >= static_cast<int>(steps(r).size()))
        return wrong(r, t, "{} hop is completed at step {}", kKindName[kind], h->complete);
      const auto& send = hop(steps(h->to)[t], kind);
      const auto& receive = hop(steps(h->from)[t], kind);
      if (!send || send->from != r || send->recv_shard != h->send_shard)
        return wrong(r, t, "{} hop to rank {} is not received there", kKindName[kind], h->to);
      if (!receive || receive->to != r || receive->send_shard != h->recv_shard)
        return wrong(r, t, "{} hop from rank {} is not sent there", kKindName[kind], h->from);
      if (state_[r].in_flight[kind])
        return wrong(r, t, "a second {} hop is posted while one is in flight", kKindName[kind]);
      if (!dkv) {
        if (!state_[r].kv.count(h->send_shard))
          return wrong(r, t, "{} hop sends KV shard {}, which is not there", kKindName[kind],
                       h->send_shard);
        continue;
      }
      const auto held = state_[r].accumulators.find(h->send_shard);
      if (held == state_[r].accumulators.end())
        return wrong(r, t, "{} hop sends the dKV of shard {}, which is not there", kKindName[kind],
                     h->send_shard);
      sent[r] = std::move(held->second);
      state_[r].accumulators.erase(held);
    }
    for (int r = 0; r < ranks_; ++r)
      if (const auto& h = hop(steps(r)[t], kind))
        state_[r].in_flight[kind] = Replica::Flight{*h, sent[h->from]};
  }

  void finish(int r, int t) {
    Replica& state = state_[r];
    const RingStep& step = steps(r)[t];
    if (step.shard >= 0) {
      if (!state.kv.count(step.shard))
        return wrong(r, t, "computes with KV shard {}, which is not there", step.shard);
      ++state.computed[step.shard];
      if (backward_) state.accumulators[step.shard].insert(r);
    }
    state.note_peaks();
    for (int kind = 0; kind < kKinds; ++kind) {
      auto& flight = state.in_flight[kind];
      if (!flight || flight->hop.complete != t) continue;
      const int shard = flight->hop.recv_shard;
      if (kind == kKvInner || kind == kKvOuter) {
        if (!state.kv.insert(shard).second)
          return wrong(r, t, "{} hop delivers KV shard {} a second time", kKindName[kind], shard);
      } else {
        auto& sum = state.accumulators[shard];
        for (int rank : flight->sum) {
          if (sum.count(rank))
            return wrong(r, t, "the contribution of rank {} to shard {} is counted twice", rank,
                         shard);
          sum.insert(rank);
        }
      }
      flight.reset();
    }
    for (int shard : step.release) {
      if (shard == r || !state.kv.erase(shard))
        return wrong(r, t, "releases KV shard {}, which is its own or not there", shard);
      for (int kind : {kKvInner, kKvOuter})
        if (state.in_flight[kind] && state.in_flight[kind]->hop.send_shard == shard)
          return wrong(r, t, "releases KV shard {} while it is being sent", shard);
    }
  }

  void check_end(int r) {
    const Replica& state = state_[r];
    const int last = static_cast<int>(steps(r).size()) - 1;
    for (int kind = 0; kind < kKinds; ++kind)
      if (state.in_flight[kind])
        return wrong(r, last, "a {} hop is never completed", kKindName[kind]);
    for (int shard = 0; shard < ranks_; ++shard) {
      const auto found = state.computed.find(shard);
      const int times = found == state.computed.end() ? 0 : found->second;
      if (times != 1) return wrong(r, last, "shard {} is computed {} times", shard, times);
    }
    if (state.kv.size() != 1)
      return wrong(r, last, "{} KV buffers are never released", state.kv.size() - 1);
    if (state.kv_peak > plans_[r].kv_buffers)
      return wrong(r, last, "{} KV buffers are alive at once, the plan promises {}", state.kv_peak,
                   plans_[r].kv_buffers);
    if (!backward_) return;
    if (state.dkv_peak > plans_[r].dkv_buffers)
      return wrong(r, last, "{} dKV buffers are alive at once, the plan promises {}",
                   state.dkv_peak, plans_[r].dkv_buffers);
    for (const auto& [shard, sum] : state.accumulators) {
      if (shard != r)
        return wrong(r, last, "the dKV of shard {} ends here, not with its owner", shard);
      for (int rank = 0; rank < ranks_; ++rank)
        if (!sum.count(rank))
          return wrong(r, last, "the dKV of shard {} misses the contribution of rank {}", shard,
                       rank);
    }
    if (state.accumulators.empty()) return wrong(r, last, "its own dKV never comes home");
  }

  const std::vector<RingPlan>& plans_;
  const bool backward_;
  const int ranks_;
  std::vector<Replica> state_;
  std::string wrong_;
};

void add_hash(Hash& hash, const std::vector<RingStep>& steps) {
  hash.add(steps.size());
  for (const auto& step : steps) {
    hash.add(step.outer).add(step.inner).add(step.shard);
    for (int kind = 0; kind < kKinds; ++kind) {
      const auto& h = hop(step, kind);
      hash.add(h.has_value());
      if (h)
        hash.add(h->level)
            .add(h->to)
            .add(h->from)
            .add(h->send_shard)
            .add(h->recv_shard)
            .add(h->complete);
    }
    hash.add(step.release.size());
    for (int shard : step.release) hash.add(shard);
  }
}

}  // namespace

std::uint64_t RingPlan::hash() const {
  Hash hash;
  hash.add(rank).add(outer).add(inner);
  add_hash(hash, forward);
  add_hash(hash, backward);
  return hash.value();
}

RingPlan plan_ring(int rank, int outer, int inner) {
  require(outer >= 1 && inner >= 1, "ring of {} x {} ranks: both sizes must be at least 1", outer,
          inner);
  require(rank >= 0 && rank < outer * inner, "ring of {} x {} ranks: rank {} lies outside [0, {})",
          outer, inner, rank, outer * inner);
  const Rings rings{rank / inner, rank % inner, outer, inner};
  RingPlan plan;
  plan.rank = rank;
  plan.outer = outer;
  plan.inner = inner;
  plan.forward = kv_steps(rings);
  plan.backward = backward_steps(rings);
  // KV: the shard an outer step entered with, the next node's on its way, and two that alternate on
  // the inner ring.
  const bool both = outer > 1 && inner > 1;
  plan.kv_buffers =
      both ? (outer > 2 ? 1 : 0) + 1 + std::min(inner - 1, 2) : std::min(outer * inner - 1, 2);
  plan.dkv_buffers = static_cast<int>(most_buffers(rank, plan.backward).sums);
  return plan;
}

int backward_buffers(const RingPlan& plan) {
  return static_cast<int>(most_buffers(plan.rank, plan.backward).of_all);
}

std::string problems(const std::vector<RingPlan>& plans) {
  if (plans.empty()) return "ring plan: no ranks";
  for (std::size_t r = 0; r < plans.size(); ++r) {
    const RingPlan& plan = plans[r];
    if (plan.rank != static_cast<int>(r) || plan.outer != plans[0].outer ||
        plan.inner != plans[0].inner || plan.ranks() != static_cast<int>(plans.size()))
      return fmt::format("ring plan: entry {} of {} is rank {} of {} x {}", r, plans.size(),
                         plan.rank, plan.outer, plan.inner);
  }
  for (bool backward : {false, true})
    if (auto text = Replay(plans, backward).run(); !text.empty())
      return fmt::format("ring plan, {}: {}", backward ? "backward" : "forward", text);
  return "";
}

double simulate(const std::vector<RingStep>& steps, const RingCosts& costs) {
  const double hop_s[kKinds] = {costs.inner_hop_s, costs.outer_hop_s, costs.inner_dkv_hop_s,
                                costs.outer_dkv_hop_s};
  double now = costs.indexing_s + costs.host_s;
  double link_free[2] = {now, now};
  std::vector<double> arrival(steps.size(), 0);  // latest end of the hops completed at a step
  for (std::size_t t = 0; t < steps.size(); ++t) {
    for (int kind = 0; kind < kKinds; ++kind) {
      const auto& h = hop(steps[t], kind);
      if (!h) continue;
      double& link = link_free[h->level == RingLevel::outer];
      link = std::max(link, now) + hop_s[kind];
      arrival.at(h->complete) = std::max(arrival.at(h->complete), link);
    }
    if (steps[t].shard >= 0) now += costs.compute_s;
    now = std::max(now, arrival[t]);
  }
  return now;
}

}  // namespace ballast
