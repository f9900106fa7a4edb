#include "parallel/context/ring_attention.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "core/plan/attention/attention_work.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/ops/elementwise.hpp"

namespace ballast {

namespace {

/// Sets the ring step in the recorder's context, for its lifetime.
class RingContext {
 public:
  explicit RingContext(Recorder* recorder) : recorder_(recorder) {}
  ~RingContext() { set(-1, -1); }
  void set(int outer, int inner) {
    if (!recorder_) return;
    recorder_->context.outer = outer;
    recorder_->context.inner = inner;
  }

 private:
  Recorder* recorder_;
};

/// One pass round the ring: the KV shards and dKV sums this rank holds, and the hops in flight
/// (core/plan/context/ring_plan.hpp has the rules).
class RingPass {
 public:
  /// k, v: this rank's own keys and values.
  RingPass(const RingGroup& group, const std::vector<std::int64_t>& shard_tokens,
           const Tensor& k_own, const Tensor& v_own, DType sum_type, Recorder* recorder)
      : group_(group),
        shard_tokens_(shard_tokens),
        k_(k_own),
        v_(v_own),
        sum_type_(sum_type),
        recorder_(recorder),
        context_(recorder),
        device_(device_of(k_own.space())) {
    capacity_ = elements(*std::max_element(shard_tokens.begin(), shard_tokens.end()));
    if (group.plan.ranks() == 1) return;
    const int own = group.plan.rank;
    RingBuffers::Lease packed = buffer(own, k_.dtype());
    Tensor k = part(packed.tensor, 0), v = part(packed.tensor, 1);
    if (shard_tokens[own] > 0) {
      copy_rows(k_, k);
      copy_rows(v_, v);
    }
    kv_.emplace(own, std::move(packed));
  }

  /// Calls `compute` for every step's shard (-1: none), its hops around it.
  void walk(const std::vector<RingStep>& steps, const std::function<void(int shard)>& compute) {
    for (int t = 0; t < static_cast<int>(steps.size()); ++t) {
      const RingStep& step = steps[t];
      context_.set(step.outer, step.inner);
      for (const auto* hop : {&step.kv_inner, &step.kv_outer})
        if (*hop) post(**hop, kv_.at((*hop)->send_shard).tensor, {}, k_.dtype(), false);
      for (const auto* hop : {&step.dkv_inner, &step.dkv_outer})
        if (*hop) {
          RingBuffers::Lease sum = std::move(dkv_.at((*hop)->send_shard));
          dkv_.erase((*hop)->send_shard);
          const Tensor sent = sum.tensor;
          post(**hop, sent, std::move(sum), sum_type_, true);
        }
      compute(step.shard);
      complete(t);
      for (int shard : step.release) kv_.erase(shard);
    }
  }

  /// [tokens of the shard, Hkv, D]; this rank's own are the caller's.
  Tensor keys(int shard) const {
    return shard == group_.plan.rank ? k_ : part(kv_.at(shard).tensor, 0);
  }
  Tensor values(int shard) const {
    return shard == group_.plan.rank ? v_ : part(kv_.at(shard).tensor, 1);
  }
  /// dK and dV of a shard, and whether they hold nothing yet.
  struct Sums {
    Tensor dk, dv;
    bool fresh = false;
  };
  Sums sums(int shard) {
    const auto [at, fresh] = dkv_.try_emplace(shard);
    if (fresh) at->second = buffer(shard, sum_type_);
    return {part(at->second.tensor, 0), part(at->second.tensor, 1), fresh};
  }
  /// Writes the whole sums of this rank's own shard.
  void result(Tensor& dk, Tensor& dv) {
    const Sums own = sums(group_.plan.rank);
    if (!home_.tensor.defined()) {
      copy_rows(own.dk, dk);
      copy_rows(own.dv, dv);
      return;
    }
    add(own.dk, part(home_.tensor, 0), dk);
    add(own.dv, part(home_.tensor, 1), dv);
  }
  /// Adds them.
  void add_result(Tensor& dk, Tensor& dv) {
    Sums own = sums(group_.plan.rank);
    if (home_.tensor.defined()) result(own.dk, own.dv);
    add(dk, own.dk, dk);
    add(dv, own.dv, dv);
  }

 private:
  struct Flight {
    RingHop hop;
    bool dkv = false;
    RingBuffers::Lease sent, received;  ///< `sent` only for dKV: KV stays readable while it travels
    std::int64_t bytes = 0;
    Pending pending;  ///< last member: completed before the buffers go
  };

  std::int64_t elements(std::int64_t tokens) const { return 2 * tokens * k_.size(1) * k_.size(2); }
  RingBuffers::Lease buffer(int shard, DType type) const {
    return group_.buffers->take({2, shard_tokens_[shard], k_.size(1), k_.size(2)}, type, device_,
                                capacity_);
  }
  static Tensor part(const Tensor& packed, int which) {
    return packed.rows(which, which + 1).reshape({packed.size(1), packed.size(2), packed.size(3)});
  }

  void post(const RingHop& hop, const Tensor& send, RingBuffers::Lease sent, DType type, bool dkv) {
    Flight flight{hop,
                  dkv,
                  std::move(sent),
                  buffer(hop.recv_shard, type),
                  static_cast<std::int64_t>(send.bytes()),
                  {}};
    const HopTransfers transfers = hop_transfers(hop, flight.received.tensor, send);
    flight.pending = group_.cp.exchange(transfers.list, transfers.channel);
    flights_.push_back(std::move(flight));
  }

  /// Completes the hops that end at step t, in the order of posting.
  void complete(int t) {
    const auto ends_now = [t](const Flight& f) { return f.hop.complete == t; };
    if (std::none_of(flights_.begin(), flights_.end(), ends_now)) return;
    {
      Scope wait(recorder_, EventKind::ring_wait);
      for (Flight& f : flights_)
        if (ends_now(f)) {
          f.pending.complete();
          wait.bytes += f.bytes;
        }
    }
    for (Flight& f : flights_) {
      if (!ends_now(f)) continue;
      if (f.dkv)
        join(f);
      else
        kv_[f.hop.recv_shard] = std::move(f.received);
    }
    std::erase_if(flights_, ends_now);
  }

  void join(Flight& f) {
    const auto held = dkv_.find(f.hop.recv_shard);
    if (held == dkv_.end()) {
      dkv_.emplace(f.hop.recv_shard, std::move(f.received));
    } else if (f.hop.recv_shard == group_.plan.rank && !home_.tensor.defined()) {
      home_ = std::move(f.received);
    } else if (held->second.tensor.numel() > 0) {
      Tensor sum = held->second.tensor;
      add(sum, f.received.tensor, sum);
    }
  }

  const RingGroup& group_;
  const std::vector<std::int64_t>& shard_tokens_;
  const Tensor k_, v_;
  const DType sum_type_;
  Recorder* recorder_;
  RingContext context_;
  Device& device_;
  std::int64_t capacity_ = 0;
  std::map<int, RingBuffers::Lease> kv_, dkv_;  ///< by shard: [2, tokens, Hkv, D]
  RingBuffers::Lease home_;  ///< sums of the own shard that result() adds where it writes anyway
  std::vector<Flight> flights_;
};

/// The calls of one backward, which add up to dQ.
struct BackwardCalls {
  const AttentionInputs& in;
  const Tensor &lse, &delta, &d_o;
  Tensor& dq;
  bool started = false;  ///< dQ holds something

  /// Adds to dk and dv, or overwrites them where they are `fresh`.
  void add(const AttentionWork& work, const Tensor& k, const Tensor& v, Tensor& dk, Tensor& dv,
           bool fresh) {
    if (work.pairs_per_head() == 0) {
      if (fresh) dk.zero(), dv.zero();
      return;
    }
    attention_backward(work, in.q, k, v, in.scale, lse, delta, d_o, dq, dk, dv,
                       {.dq = started, .dkv = !fresh});
    started = true;
  }
};

}  // namespace

RingAttention::RingAttention(const RingGroup& group, std::unique_ptr<IndexSource> source,
                             Recorder* recorder, StoredChunk stored)
    : group_(group), recorder_(recorder), source_(std::move(source)), stored_(std::move(stored)) {
  const int ranks = group.plan.ranks();
  require(group.cp.size() == ranks && group.cp.rank() == group.plan.rank,
          "ring attention: the plan is for rank {} of {}, the communicator has rank {} of {}",
          group.plan.rank, ranks, group.cp.rank(), group.cp.size());
  const AttentionAxes& axes = source_->axes();
  require(static_cast<int>(axes.keys.size()) == ranks && axes.rank == group.plan.rank,
          "ring attention: the index is for rank {} of {} shards, the ring has rank {} of {}",
          axes.rank, axes.keys.size(), group.plan.rank, ranks);
  const auto& calls = axes.calls();
  const std::size_t turns =
      stored_.store ? static_cast<std::size_t>(stored_.store->turns(stored_.chunk)) : 1;
  require(calls.size() == turns * static_cast<std::size_t>(ranks),
          "ring attention: indexes for {} calls, {} turns round {} ranks", calls.size(), turns,
          ranks);
  tokens_.resize(turns);
  for (std::size_t c = 0; c < calls.size(); ++c)
    tokens_[c / static_cast<std::size_t>(ranks)].push_back(token_count(calls[c]));
}

void RingAttention::check(const AttentionInputs& in) const {
  const std::int64_t queries = source_->axes().q_tokens();
  const std::int64_t keys =
      stored_.store ? queries : tokens_[0][static_cast<std::size_t>(group_.plan.rank)];
  require(in.q.rank() == 3 && in.k.rank() == 3 && in.q.size(0) == queries && in.k.size(0) == keys &&
              in.v.shape() == in.k.shape() && in.q.size(2) == in.k.size(2),
          "ring attention: this rank has {} queries and {} keys of the micro-batch; q {}, k {}, v "
          "{} do not fit",
          queries, keys, to_string(in.q.shape()), to_string(in.k.shape()), to_string(in.v.shape()));
}

const std::vector<AttentionWork>& RingAttention::indexes(const AttentionInputs& in) {
  if (!stored_.store || !source_->reads_keys(in.layer)) return source_->shards(in);
  AttentionInputs all = in;
  const auto [k, lease] = stored_.store->all_keys(in.layer, stored_.chunk, in.k, in.v);
  all.k = k;
  return source_->shards(all);
}

KvStore::Keys RingAttention::keys(const AttentionInputs& in, int turn) {
  if (turn == turns()) return {};
  if (stored_.store) return stored_.store->keys(in.layer, stored_.chunk, turn, in.k, in.v);
  return {in.k, in.v, {}};
}

KvStore::Sums RingAttention::sums(const AttentionInputs& in, int turn) {
  if (!stored_.store || turn == turns()) return {};
  return stored_.store->sums(in.layer, stored_.chunk, turn);
}

void RingAttention::forward(const AttentionInputs& in, Tensor& o, Tensor& lse) {
  check(in);
  const std::vector<AttentionWork>& all = indexes(in);
  const double flops_per_pair = 4.0 * static_cast<double>(in.q.size(1) * in.q.size(2));
  Device& device = device_of(in.q.space());
  // Partial outputs meet in the type of the LSE: where `o` has it they meet there.
  RingBuffers::Lease sum_lease, part_o, part_lse;
  Tensor sum = o;
  if (group_.plan.ranks() > 1 || turns() > 1) {
    if (o.dtype() != lse.dtype() || !o.contiguous()) {
      sum_lease = group_.buffers->take(o.shape(), lse.dtype(), device);
      sum = sum_lease.tensor;
    }
    part_o = group_.buffers->take(o.shape(), lse.dtype(), device);
    part_lse = group_.buffers->take(lse.shape(), lse.dtype(), device);
  }
  bool started = false;  // a rank's first shard is its own, where every token sees itself: only a
                         // rank without tokens never starts
  KvStore::Keys next = keys(in, 0);
  for (int turn = 0; turn < turns(); ++turn) {
    KvStore::Keys own = std::move(next);
    next = keys(in, turn + 1);
    if (stored_.store) stored_.store->arrive(own);
    RingPass pass(group_, tokens_[static_cast<std::size_t>(turn)], own.k, own.v, lse.dtype(),
                  recorder_);
    pass.walk(group_.plan.forward, [&](int shard) {
      Scope scope(recorder_, EventKind::attention_forward);
      const double pairs = index(all, turn, shard).pairs_per_head();
      scope.flops = flops_per_pair * pairs;
      if (pairs == 0) return;
      Tensor& to = started ? part_o.tensor : sum;
      Tensor& to_lse = started ? part_lse.tensor : lse;
      attention_forward(index(all, turn, shard), in.q, pass.keys(shard), pass.values(shard),
                        in.scale, to, to_lse);
      if (started) attention_merge(sum, lse, part_o.tensor, part_lse.tensor);
      started = true;
    });
  }
  if (started && sum.raw() != o.raw()) copy_rows(sum, o);
}

void RingAttention::backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse,
                             const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv) {
  check(in);
  const std::vector<AttentionWork>& all = indexes(in);
  const double flops_per_pair = 10.0 * static_cast<double>(in.q.size(1) * in.q.size(2));
  Device& device = device_of(in.q.space());
  const bool empty = in.q.size(0) == 0;
  RingBuffers::Lease delta = group_.buffers->take(lse.shape(), lse.dtype(), device), dq_lease;
  bool begun = false;  // delta is formed beside the first hop
  Tensor dq_sum = dq;
  if (dq.dtype() != lse.dtype() || !dq.contiguous()) {
    dq_lease = group_.buffers->take(dq.shape(), lse.dtype(), device);
    dq_sum = dq_lease.tensor;
  }
  BackwardCalls calls{in, lse, delta.tensor, d_o, dq_sum};
  const bool in_place = stored_.store && group_.plan.ranks() == 1;
  KvStore::Keys next = keys(in, 0);
  KvStore::Sums next_sums = sums(in, 0);
  for (int turn = 0; turn < turns(); ++turn) {
    KvStore::Keys own = std::move(next);
    KvStore::Sums stored = std::move(next_sums);
    next = keys(in, turn + 1);
    next_sums = sums(in, turn + 1);
    if (stored_.store) stored_.store->arrive(own);
    if (in_place) stored_.store->arrive(stored);
    RingPass pass(group_, tokens_[static_cast<std::size_t>(turn)], own.k, own.v, lse.dtype(),
                  recorder_);
    pass.walk(group_.plan.backward, [&](int shard) {
      if (!std::exchange(begun, true) && !empty) attention_delta(o, d_o, delta.tensor);
      if (shard < 0) return;
      RingPass::Sums to = in_place ? RingPass::Sums{stored.dk, stored.dv} : pass.sums(shard);
      Scope scope(recorder_, EventKind::attention_backward);
      const AttentionWork& work = index(all, turn, shard);
      scope.flops = flops_per_pair * work.pairs_per_head();
      calls.add(work, pass.keys(shard), pass.values(shard), to.dk, to.dv, to.fresh);
    });
    if (!stored_.store) {
      if (empty) continue;
      pass.result(dk, dv);
      continue;
    }
    if (!in_place) stored_.store->arrive(stored);
    if (!in_place && stored.dk.size(0) > 0) pass.add_result(stored.dk, stored.dv);
    if (turn == 0 && !empty) {
      const auto [begin, end] = stored_.store->own_rows(stored_.chunk);
      copy_rows(stored.dk.rows(begin, end), dk);
      copy_rows(stored.dv.rows(begin, end), dv);
    }
    stored_.store->keep(in.layer, stored_.chunk, turn, stored);
  }
  if (stored_.store) stored_.store->finish(in.layer, stored_.chunk);
  if (!calls.started) dq_sum.zero();
  if (!empty && dq_sum.raw() != dq.raw()) copy_rows(dq_sum, dq);
}

}  // namespace ballast
