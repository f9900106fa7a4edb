#include "core/predict/memory_replay.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/model/fp8_specs.hpp"
#include "core/model/tensor_specs.hpp"
#include "core/plan/context/ring_plan.hpp"
#include "core/plan/context/ulysses_heads.hpp"
#include "core/predict/bucket_replay.hpp"

namespace ballast {
namespace {

bool is_transfer(OpKind kind) { return kind == OpKind::send || kind == OpKind::recv; }

class Replay {
 public:
  explicit Replay(const StageMemory& stage)
      : stage_(stage),
        statistics_(statistics_type(stage.type)),
        element_(static_cast<std::int64_t>(size_of(stage.type))),
        sum_(static_cast<std::int64_t>(size_of(statistics_))),
        scratch_(ledger_),
        lent_(ledger_, MemoryCategory::communication),
        windows_(ledger_, MemoryCategory::kv_store),
        away_(ledger_, MemoryCategory::offloaded) {
    buckets_.hold_state(element_);
  }

  void evaluate(const StageWork& evaluation) {
    begin(evaluation, true);
    walk();
  }
  /// `grown`: nothing grows that a step before has grown.  Peaks are the step's own.
  MemoryEstimate train(const StageWork& step, bool grown = false) {
    begin(step, false);
    ledger_.reset_peak();
    if (grown) scratch_.settle();
    walk();
    if (stage_.overlap_bytes > 0)
      hold(stage_.overlap_bytes, MemoryCategory::communication);  // for a moment
    const Held lent = hold(muon_.lent * sum_, MemoryCategory::communication);
    hold(muon_.workspace_bytes, MemoryCategory::workspace);
    MemoryEstimate found = ledger_.peak();
    found.pool_bytes = scratch_.bytes();
    if (!stage_.host) found.context_bytes = kContextBytes;
    return found;
  }

 private:
  /// A micro-batch between its first op and its last.
  struct Live {
    Held batch, input, output, d_output, d_input, tables, head;
    std::vector<Held> layers, gradients, indexes;
    LentBuffers::Loan away;
  };
  struct Store {  ///< of a sample that is cut into chunks, one layer
    Held kv, dkv;
    LentBuffers::Loan kv_away, dkv_away;
    bool made = false, summed = false;
  };

  Held hold(std::int64_t bytes, MemoryCategory category = MemoryCategory::activations) {
    return Held(ledger_, category, bytes);
  }
  const RankMicroBatch& of(const Op& op) const {
    return work_->list.at(static_cast<std::size_t>(op.micro_batch));
  }
  std::int64_t hidden_bytes(const RankMicroBatch& m) const {
    return m.tokens * stage_.model.hidden * element_;
  }
  Keep keep(const RankMicroBatch& m, std::int64_t layer) const {
    const Keep level = keep_of(stage_.recompute.with(m.recompute_layers).of(layer));
    return stage_.fp8 ? fp8_keep(level, stage_.model) : level;
  }

  bool makes_again() const { return stage_.fp8 && fp8_makes_again(stage_.model); }

  void begin(const StageWork& work, bool evaluates) {
    work_ = &work;
    evaluates_ = evaluates;
    recomputed_.clear();
    last_op_.clear();
    const std::vector<Op>& ops = work.ops;
    ends_ = work.meets_in_backward ? ends_gradients(ops) : std::vector<char>{};
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].kind == OpKind::recompute) recomputed_.insert(ops[i].micro_batch);
      if (ops[i].kind != OpKind::collective) last_op_[ops[i].micro_batch] = i;
    }
  }

  void walk() {
    recalled_.clear();
    for (std::size_t i = 0; i < work_->ops.size(); ++i) {
      const Op& op = work_->ops[i];
      if (op.kind == OpKind::collective) {
        buckets_.end_round();
        continue;
      }
      reduces_ = !ends_.empty() && ends_[i] != 0;
      if (computes(op.kind) && stage_.host) post_receives(i + 1);
      run(op, i);
      if (last_op_.at(op.micro_batch) == i) live_.erase(op.micro_batch);
      leaving_.erase(i);
    }
    buckets_.end_step();
    losses_.clear();
    leaving_.clear();
    live_.clear();
    stores_.clear();
  }

  Live& live(const Op& op) {
    const auto [at, fresh] = live_.try_emplace(op.micro_batch);
    if (fresh)
      at->second.batch =
          hold(of(op).tokens * stage_.token_bytes(evaluates_ ? 0 : sum_), MemoryCategory::data);
    return at->second;
  }

  /// Receives up to the next computation are posted ahead of it.
  void post_receives(std::size_t from) {
    const std::vector<Op>& ops = work_->ops;
    for (std::size_t i = from; i < ops.size() && is_transfer(ops[i].kind); ++i)
      if (ops[i].kind == OpKind::recv && posted_.count(i) == 0) {
        live(ops[i]);
        posted_.emplace(i, hold(hidden_bytes(of(ops[i])), ops[i].payload == Payload::activation
                                                              ? MemoryCategory::activations
                                                              : MemoryCategory::communication));
      }
  }

  void run(const Op& op, std::size_t at) {
    Live& l = live(op);
    switch (op.kind) {
      case OpKind::recv: {
        post_receives(at);
        Held received = std::move(posted_.extract(at).mapped());
        (op.payload == Payload::activation ? l.input : l.d_output) = std::move(received);
        break;
      }
      case OpKind::send:
        leaving_.emplace(
            work_->given_back.at(at),
            std::exchange(op.payload == Payload::activation ? l.output : l.d_input, {}));
        break;
      case OpKind::forward:
      case OpKind::recompute:
        forward(op, l);
        break;
      case OpKind::backward:
      case OpKind::backward_input:
        backward(op, l, op.kind == OpKind::backward_input);
        break;
      case OpKind::backward_weight:
        for (std::int64_t layer = stage_.layers - 1; layer >= 0; --layer) {
          buckets_.add_layer(layer);
          if (!l.layers.empty()) l.layers.pop_back();
          if (!l.gradients.empty()) l.gradients.pop_back();
          if (reduces_) buckets_.gradients_final(stage_.first_layer + layer);
        }
        l.layers.clear();
        l.gradients.clear();
        if (reduces_) buckets_.gradients_final(-1);
        break;
      case OpKind::offload:
        l.away = away_.take(stage_.type, of(op).tokens * stage_.model.hidden);
        leaving_.emplace(work_->given_back.at(at), std::exchange(l.input, {}));
        break;
      case OpKind::fetch:
        l.input = hold(hidden_bytes(of(op)));
        break;
      case OpKind::collective:
        break;
    }
  }

  void forward(const Op& op, Live& l) {
    const RankMicroBatch& m = of(op);
    const bool again = op.kind == OpKind::recompute,
               kept = again || (!evaluates_ && recomputed_.count(op.micro_batch) == 0);
    if (again) l.away = {};
    const std::int64_t tables = 2 * m.tokens * (stage_.model.head_dim / 2) * sum_;
    if (kept)
      l.tables = hold(tables);
    else
      scratch_.take("rotary tables", tables);
    if (stage_.first && !kept) scratch_.take("embedded", hidden_bytes(m));
    if (kept) l.layers.reserve(static_cast<std::size_t>(stage_.layers));
    const ChoiceBytes choice = stage_.host && !again ? host_choice(m) : ChoiceBytes{};
    KnownRise* const known = alike(m, false);
    for (std::int64_t layer = 0; layer < stage_.layers; ++layer) {
      const Keep level = kept ? keep(m, layer) : Keep::nothing;
      const auto [bytes, fresh] = forwards_.try_emplace({m.tokens, level, kept, layer == 0}, 0);
      if (fresh) bytes->second = kept_bytes(m, level, kept, layer == 0);
      if (kept) l.layers.push_back(hold(bytes->second));
      if (fresh) {
        take(LayerScratch::branch, m);
        take_rounded(m, false);
        take_adapters(m, false);
      }
      if (!again) choose_index(m, layer, choice, l);
      attention(m, layer, false, known);
    }
    if (kept && !stage_.first && !l.layers.empty()) {
      // What came from the stage before is the first layer's input now.
      l.layers.front().grow(hidden_bytes(m));
      l.input = {};
    }
    if (stage_.last && evaluates_) {
      take_head(m);
    } else if (stage_.last && kept) {
      l.head = hold(hidden_bytes(m));  // gradient of the last layer's output
      losses_.push_back(hold(m.tokens * sum_, MemoryCategory::workspace));
      losses_.push_back(hold(stage_.weighted ? m.tokens * sum_ : 0, MemoryCategory::data));
      take_head(m);
      buckets_.add_head();
    } else if (!stage_.last) {
      Held output = hold(hidden_bytes(m), MemoryCategory::workspace);
      if (!again) l.output = std::move(output);
    }
  }

  /// Bytes that a layer keeps of its activations; the others lie in scratch, which is taken.
  std::int64_t kept_bytes(const RankMicroBatch& m, Keep level, bool kept, bool first_layer) {
    std::int64_t bytes = 0;
    for (const ActivationSpec& spec : activations(m)) {
      if (makes_again() && fp8_made_again(spec)) continue;
      // The first layer takes its input as it comes: embedded, or from the stage before.
      if (spec.kept_from == Keep::input && first_layer) {
        if (kept && stage_.first) bytes += spec.bytes(stage_.type);
      } else if (level >= spec.kept_from) {
        bytes += spec.bytes(stage_.type);
      } else {
        scratch_.take(spec.name, spec.bytes(stage_.type));
      }
    }
    return bytes;
  }
  /// Bytes that a layer's backward makes again for its weight half; the others lie in scratch.
  std::int64_t restored_bytes(const RankMicroBatch& m, Keep level, bool halves) {
    std::int64_t bytes = 0;
    for (const ActivationSpec& spec : activations(m)) {
      if (level >= spec.kept_from) continue;
      if (makes_again() && !halves && fp8_made_again(spec)) continue;
      if (halves && spec.weight_input)
        bytes += spec.bytes(stage_.type);
      else
        scratch_.take(spec.name, spec.bytes(stage_.type));
    }
    return bytes;
  }

  /// Of a layer, made once for each number of tokens.
  const std::vector<ActivationSpec>& activations(const RankMicroBatch& m) {
    const auto [at, fresh] = activations_.try_emplace(m.tokens);
    if (fresh) at->second = layer_activations(stage_.model, m.tokens);
    return at->second;
  }

  void take(const ScratchSpec& spec, std::int64_t rows) {
    scratch_.take(spec.name, rows * spec.columns * (spec.statistic ? sum_ : element_));
  }
  void take(LayerScratch which, const RankMicroBatch& m) {
    take(layer_scratch(stage_.model, which), m.tokens);
  }
  void take_adapters(const RankMicroBatch& m, bool backward) {
    for (const ScratchSpec& spec : adapters_)
      if (backward || !spec.backward) take(spec, m.tokens);
  }
  void take_rounded(const RankMicroBatch& m, bool backward, bool halves = false) {
    if (!stage_.fp8) return;
    for (const Fp8Scratch& spec :
         fp8_scratch(stage_.model, m.tokens, backward, halves, stage_.host))
      scratch_.take(spec.name, spec.bytes);
  }
  void take_head(const RankMicroBatch& m) {
    const std::int64_t rows = std::min(stage_.head_chunk_tokens, m.tokens);
    if (!head_rows_.insert(rows).second) return;
    for (const ScratchSpec& spec : head_scratch(stage_.model)) take(spec, rows);
  }

  void backward(const Op& op, Live& l, bool halves) {
    const RankMicroBatch& m = of(op);
    Held d =
        stage_.last ? std::exchange(l.head, {}) : hold(hidden_bytes(m), MemoryCategory::workspace);
    const std::int64_t between =
        halves ? between_halves_bytes(stage_.model, m.tokens, stage_.type) : 0;
    std::vector<Held> later;
    KnownRise *const forward = alike(m, false), *const backward = alike(m, true);
    if (reduces_) buckets_.gradients_final(stage_.first_layer + stage_.layers);
    for (std::int64_t layer = stage_.layers - 1; layer >= 0; --layer) {
      const Keep level = keep(m, layer);
      buckets_.add_layer(layer);
      const auto [restored, fresh] = backwards_.try_emplace({m.tokens, level, halves}, 0);
      if (fresh) restored->second = restored_bytes(m, level, halves);
      Held again = hold(restored->second), gradients;
      if (fresh) {
        take_adapters(m, true);
        take_rounded(m, true, halves);
      }
      if (level == Keep::input) attention(m, layer, false, forward);
      if (fresh && level == Keep::input) take(LayerScratch::branch, m);
      if (halves)
        gradients = hold(
            m.tokens * element_ *
            (qkv_width(stage_.model) + 2 * stage_.model.hidden + 2 * stage_.model.intermediate));
      for (int s = 1; fresh && s < kLayerScratch; ++s) {
        const auto which = static_cast<LayerScratch>(s);
        if (!(halves || makes_again()) || !layer_scratch(stage_.model, which).kept_between_halves)
          take(which, m);
      }
      attention(m, layer, true, backward);
      if (!l.layers.empty()) l.layers.pop_back();
      if (halves) {  // what was made again stays for the weight half
        again.grow(between - gradients.bytes() - again.bytes());
        later.push_back(std::move(again));
        l.gradients.push_back(std::move(gradients));
      }
      if (reduces_) buckets_.gradients_final(stage_.first_layer + layer);
    }
    buckets_.add_embedding();
    if (reduces_) buckets_.gradients_final(-1);
    for (Held& h : later) l.layers.push_back(std::move(h));
    l.tables = {}, l.head = {}, l.d_output = {};
    if (!stage_.first) l.d_input = std::move(d);
  }

  std::int64_t window_tokens() const { return stage_.offload ? stage_.window_tokens : 0; }
  int turns(const RankMicroBatch& m) const { return ballast::turns(m, window_tokens()); }
  /// Elements of the largest window of stored keys and values.
  std::int64_t window_elements(const RankMicroBatch& m, std::int64_t row) const {
    return 2 * std::min<std::int64_t>(window_chunks(m, window_tokens()), m.chunks) *
           (m.sample_tokens / m.chunks) * row;
  }

  struct Heads {
    std::int64_t query, kv;  ///< widths of one rank's
  };
  Heads heads(const RankMicroBatch& m) const {
    const HeadSplit split{m.split.sp, stage_.model.query_heads, stage_.model.kv_heads};
    return {split.local_query_heads() * stage_.model.head_dim,
            split.local_kv_heads() * stage_.model.head_dim};
  }
  std::int64_t local_heads(const RankMicroBatch& m) const {
    return stage_.model.query_heads / m.split.sp;
  }

  ChoiceBytes host_choice(const RankMicroBatch& m) const {
    const Heads width = heads(m);
    const std::int64_t dim = stage_.model.head_dim,
                       keys = m.sample < 0 ? m.shard_tokens
                                           : m.sample_tokens / m.chunks * (m.chunk + 1);
    return choice_bytes(
        m.index, {width.query / dim, width.kv / dim, dim, keys, m.split.ring(), stage_.type});
  }
  /// A pattern is chosen in a layer's first forward and kept; recall is measured once a step.
  void choose_index(const RankMicroBatch& m, std::int64_t layer, const ChoiceBytes& bytes,
                    Live& l) {
    const LentBuffers::Loan back = stored_keys(m, static_cast<int>(layer));
    if (!stage_.host) return hold_gpu_index(m.gpu_index, layer, l);
    if (reduced_.bytes() < bytes.reduced) reduced_.grow(bytes.reduced - reduced_.bytes());
    {
      const Held observed = hold(bytes.observed, MemoryCategory::workspace);
      hold(bytes.message, MemoryCategory::communication);
    }
    if (!evaluates_ && m.index.recall.rows > 0 && recalled_.insert(layer).second)
      hold(bytes.recall, MemoryCategory::workspace);
  }

  /// All keys so far come back to be looked at, where they are away.
  LentBuffers::Loan stored_keys(const RankMicroBatch& m, int layer) {
    const AttentionOptions& options = stage_.index.options;
    if (m.sample < 0 || !stage_.offload || !options.chosen() || !options.sparse()) return {};
    store(m, layer, false);
    const std::int64_t row = heads(m).kv, all = m.sample_tokens / m.chunks * (m.chunk + 1);
    windows_.take(stage_.type, 2 * row * m.shard_tokens, window_elements(m, row));
    return windows_.take(stage_.type, row * all);
  }
  void hold_gpu_index(const GpuIndexBytes& bytes, std::int64_t layer, Live& l) {
    scratch_.take("kernels", bytes.kernels);
    if (generated_.size() < kCachedIndexes && generated_.insert(bytes.cached).second)
      scratch_.take("generated " + std::to_string(bytes.cached), bytes.cached);
    if (l.indexes.empty()) l.indexes.push_back(hold(bytes.micro_batch, MemoryCategory::workspace));
    const Held choosing = hold(bytes.choosing, MemoryCategory::workspace);
    l.indexes.push_back(hold(bytes.layer(stage_.first_layer + layer), MemoryCategory::workspace));
    if (!evaluates_ && bytes.recall > 0 && recalled_.insert(layer).second)
      hold(bytes.recall, MemoryCategory::workspace);
  }

  /// Tiles of the host's attention, for as long as it runs.
  Held tiles(const RankMicroBatch& m, bool backward) {
    if (!stage_.host || m.tokens == 0) return {};
    return hold(attention_tile_bytes(stacked(m), stage_.model.head_dim, element_, backward),
                MemoryCategory::workspace);
  }
  std::int64_t stacked(const RankMicroBatch& m) const {  ///< query heads that choose alike
    return m.longest > stage_.dense_keys ? 1 : heads(m).query / heads(m).kv;
  }

  /// A chunk's keys and values, or their gradients, in the store of its sample.
  Store& store(const RankMicroBatch& m, int layer, bool sums) {
    Store& s = stores_[{m.sample, layer}];
    const std::int64_t elements = 2 * m.sample_tokens * heads(m).kv;
    bool& done = sums ? s.summed : s.made;
    if (std::exchange(done, true)) return s;
    if (stage_.offload)
      (sums ? s.dkv_away : s.kv_away) = away_.take(sums ? statistics_ : stage_.type, elements);
    else
      (sums ? s.dkv : s.kv) = hold(elements * (sums ? sum_ : element_), MemoryCategory::kv_store);
    return s;
  }

  /// Buffers of one turn round the ring.
  std::vector<LentBuffers::Loan> ring(const RankMicroBatch& m, std::int64_t shard, bool backward,
                                      bool in_place) {
    std::vector<LentBuffers::Loan> loans;
    const RingPlan& plan = ring_plan(m.split);
    const std::int64_t elements = 2 * shard * heads(m).kv;
    const int kv = plan.ranks() > 1 ? 1 + plan.kv_buffers : 0;
    int sums = backward && !in_place ? std::max(1, plan.dkv_buffers) : 0;
    if (kv > 0 && sums > 0 && element_ == sum_) sums = std::max(kv, backward_buffers(plan)) - kv;
    for (int b = 0; b < kv; ++b) loans.push_back(lent_.take(stage_.type, elements, elements));
    for (int b = 0; b < sums; ++b) loans.push_back(lent_.take(statistics_, elements, elements));
    return loans;
  }
  const RingPlan& ring_plan(const ContextSplit& split) {
    const auto [at, fresh] = rings_.try_emplace({split.ring_outer, split.ring_inner});
    if (fresh) at->second = plan_ring(0, split.ring_outer, split.ring_inner);
    return at->second;
  }

  void ring_forward(const RankMicroBatch& m, int layer) {
    const std::int64_t queries = m.shard_tokens;
    LentBuffers::Loan sum, part_o, part_lse;
    if (m.split.ring() > 1 || turns(m) > 1) {
      if (element_ != sum_) sum = lent_.take(statistics_, queries * heads(m).query);
      part_o = lent_.take(statistics_, queries * heads(m).query);
      part_lse = lent_.take(statistics_, queries * local_heads(m));
    }
    if (m.sample < 0) {
      const auto loans = ring(m, m.hop_tokens, false, false);
      Held tile = tiles(m, false);
      return;
    }
    store(m, layer, false);
    if (stage_.offload)  // the chunk's own leave through a window
      windows_.take(stage_.type, 2 * queries * heads(m).kv, window_elements(m, heads(m).kv));
    LentBuffers::Loan own, next;
    for (int turn = 0; turn < turns(m); ++turn) {
      own = std::move(next);
      next = turn + 1 < turns(m) ? window(m, stage_.type) : LentBuffers::Loan{};
      const auto loans = ring(m, turn_tokens(m, turn, window_tokens()), false, false);
      Held tile = tiles(m, false);
    }
  }
  LentBuffers::Loan window(const RankMicroBatch& m, DType type) {
    const std::int64_t most = window_elements(m, heads(m).kv);
    return windows_.take(type, most, most);
  }
  void ring_backward(const RankMicroBatch& m, int layer) {
    const std::int64_t queries = m.shard_tokens;
    const auto delta = lent_.take(statistics_, queries * local_heads(m));
    LentBuffers::Loan dq;
    if (element_ != sum_ && m.split.sp > 1) dq = lent_.take(statistics_, queries * heads(m).query);
    const bool stored = m.sample >= 0, in_place = stored && m.split.ring() == 1;
    if (stored) store(m, layer, true);
    LentBuffers::Loan own, next, sums, next_sums;
    if (stored && stage_.offload) next_sums = window(m, statistics_);
    for (int turn = 0; turn < turns(m); ++turn) {
      own = std::move(next), sums = std::move(next_sums);
      if (turn + 1 < turns(m)) next = window(m, stage_.type), next_sums = window(m, statistics_);
      const auto loans =
          ring(m, stored ? turn_tokens(m, turn, window_tokens()) : m.hop_tokens, true, in_place);
      Held tile = tiles(m, true);
    }
    if (stored && m.chunk == 0) stores_.erase({m.sample, layer});
  }

  /// Layers whose attention takes the same buffers differ in nothing, but where each grows the
  /// store of its sample: null.
  KnownRise* alike(const RankMicroBatch& m, bool backward) {
    if (m.sample >= 0) return nullptr;
    return &rises_[{{m.tokens, m.shard_tokens, m.hop_tokens, stacked(m)},
                    {m.split.sp, m.split.ring_outer, m.split.ring_inner, backward}}];
  }
  void attention(const RankMicroBatch& m, std::int64_t layer, bool backward, KnownRise* alike) {
    const auto attend = [&] {
      backward ? attention_backward(m, static_cast<int>(layer))
               : attention_forward(m, static_cast<int>(layer));
    };
    alike != nullptr ? alike->take(ledger_, lent_, attend) : attend();
  }

  /// Tokens of what goes out to all ranks or comes from them, a block of the rank's own for each.
  std::int64_t exchanged(const RankMicroBatch& m) const {
    return (m.shard_tokens + (work_->fewest ? 0 : m.split.sp - 1)) / m.split.sp * m.split.sp;
  }
  void attention_forward(const RankMicroBatch& m, int layer) {
    if (m.split.sp == 1) return ring_forward(m, layer);
    const std::int64_t width = heads(m).query + 2 * heads(m).kv, all = m.shard_tokens,
                       own = exchanged(m);
    const auto whole = gather(m, width, false);
    const auto whole_o = lent_.take(stage_.type, all * heads(m).query);
    const auto whole_lse = lent_.take(statistics_, all * local_heads(m));
    ring_forward(m, layer);
    const auto received = lent_.take(stage_.type, own * heads(m).query);
    const auto lse_blocks = lent_.take(statistics_, all * local_heads(m));
  }
  /// All tokens with one rank's heads; the blocks that go out are given back.
  std::vector<LentBuffers::Loan> gather(const RankMicroBatch& m, std::int64_t width, bool lse) {
    std::vector<LentBuffers::Loan> loans;
    loans.push_back(lent_.take(stage_.type, m.shard_tokens * width));
    const auto sent = lent_.take(stage_.type, exchanged(m) * width);
    if (!lse) return loans;
    loans.push_back(lent_.take(statistics_, m.shard_tokens * local_heads(m)));
    const auto blocks = lent_.take(statistics_, m.shard_tokens * local_heads(m));
    return loans;
  }

  void attention_backward(const RankMicroBatch& m, int layer) {
    if (m.split.sp == 1) return ring_backward(m, layer);
    const std::int64_t query = heads(m).query, kv = heads(m).kv, all = m.shard_tokens,
                       own = exchanged(m);
    const bool repeats = kv * m.split.sp > kv_width(stage_.model);
    const DType kv_type = repeats ? statistics_ : stage_.type;
    const auto whole_q = lent_.take(stage_.type, all * query);
    const auto whole_kv = lent_.take(kv_type, all * 2 * kv);
    {
      const auto whole = gather(m, 3 * query + 2 * kv, true);
      ring_backward(m, layer);
    }
    const auto received_q = lent_.take(stage_.type, own * query);
    const auto received_kv = lent_.take(kv_type, own * 2 * kv);
    if (repeats) lent_.take(kv_type, m.tokens * 2 * kv_width(stage_.model));
  }

  std::map<std::int64_t, std::vector<ActivationSpec>> activations_;
  /// Bytes of layers by tokens, what is kept and where they stand: layers alike take no more
  /// scratch than the first of them.
  std::map<std::tuple<std::int64_t, Keep, bool, bool>, std::int64_t> forwards_;
  std::map<std::tuple<std::int64_t, Keep, bool>, std::int64_t> backwards_;
  std::map<std::pair<std::array<std::int64_t, 4>, std::array<int, 4>>, KnownRise> rises_;
  std::set<std::int64_t> head_rows_;  ///< whose scratch is taken
  const StageMemory& stage_;
  const StageWork* work_ = nullptr;
  bool evaluates_ = false;  ///< keeps nothing for a backward
  const DType statistics_;
  const std::int64_t element_, sum_;
  const MuonShare muon_ = heaviest(stage_.muon);
  const std::vector<ScratchSpec> adapters_ = adapter_scratch(stage_.model);
  std::vector<char> ends_;  ///< [op] ends_gradients, where its ranks meet in backwards
  bool reduces_ = false;    ///< whether the backward that runs reduces
  std::set<int> recomputed_;
  std::set<std::int64_t> generated_;  ///< sizes of indexes that are kept
  std::set<std::int64_t> recalled_;   ///< layers whose recall this step has measured
  std::map<int, std::size_t> last_op_;
  std::map<std::pair<int, int>, RingPlan> rings_;

  Ledger ledger_;
  BucketReplay buckets_{stage_, ledger_, sum_};
  NamedScratch scratch_;
  LentBuffers lent_, windows_, away_;
  Held reduced_ = hold(0, MemoryCategory::communication);  ///< receive space of a ring's sums
  std::map<int, Live> live_;
  std::map<std::size_t, Held> posted_;
  std::multimap<std::size_t, Held> leaving_;  ///< by the op that they are given back after
  std::vector<Held> losses_;
  std::map<std::pair<int, int>, Store> stores_;  ///< by sample and layer
};

}  // namespace

MemoryEstimate replay_memory(const StageMemory& stage, const StageWork& step,
                             const std::vector<ForwardPasses>& between) {
  Replay replay(stage);
  for (const ForwardPasses& passes : between) replay.evaluate(passes.work);
  replay.train(step);
  return replay.train(step, true);
}

MemoryEstimate replay_run(const StageMemory& stage, const std::vector<StageWork>& steps,
                          const std::vector<ForwardPasses>& between) {
  Replay replay(stage);
  MemoryEstimate most;
  for (std::size_t step = 0; step < steps.size(); ++step) {
    most.take_peaks(replay.train(steps[step]));
    for (const ForwardPasses& passes : between)
      if (passes.when.follows(static_cast<std::int64_t>(step) + 1)) replay.evaluate(passes.work);
  }
  return most;
}

}  // namespace ballast
