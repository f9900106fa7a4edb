#include "parallel/context/ulysses.hpp"

#include <utility>

#include "kernels/ops/elementwise.hpp"

namespace ballast {

/// A tensor [own tokens, heads, D] to gather: query heads are shared out, key/value heads repeated
/// where needed.
struct UlyssesAttention::Part {
  Tensor tensor;
  bool kv = false;
};

namespace {

/// Calls `run(first head, heads, first local head)` for the ranges that make up the local key/value
/// heads of `rank`, in ascending order: all at once, or one by one where heads are repeated.
template <class F>
void for_kv_ranges(const HeadSplit& heads, int rank, F&& run) {
  const std::int64_t count = heads.local_kv_heads();
  for (std::int64_t j = 0, next; j < count; j = next) {
    const std::int64_t first = heads.kv_head(rank, j);
    next = heads.repeats() ? j + 1 : count;
    run(first, next - j, j);
  }
}

void copy(const Tensor& from, Tensor to) { copy_rows(from, to); }

/// q, k and v out of the joined heads of all tokens.
AttentionInputs slices(const Tensor& whole, const AttentionInputs& in, std::int64_t query,
                       std::int64_t kv) {
  AttentionInputs local = in;
  local.q = whole.narrow(1, 0, query);
  local.k = whole.narrow(1, query, query + kv);
  local.v = whole.narrow(1, query + kv, query + 2 * kv);
  return local;
}

}  // namespace

void connect(const Communicator& group, Device& device) {
  Tensor sent = Tensor::zeros({1}, DType::f32, device, MemoryCategory::communication);
  Tensor received =
      Tensor::zeros({group.size()}, DType::f32, device, MemoryCategory::communication);
  std::vector<Transfer> transfers;
  for (int p = 0; p < group.size(); ++p) {
    if (p == group.rank()) continue;
    transfers.push_back({received.rows(p, p + 1), p, false});
    transfers.push_back({sent, p, true});
  }
  group.exchange(transfers).complete();
  device.synchronize();
}

UlyssesAttention::UlyssesAttention(const Communicator& sequence, RingBuffers& buffers,
                                   std::int64_t tokens, std::unique_ptr<AttentionExecutor> inner,
                                   Recorder* recorder)
    : sequence_(sequence),
      buffers_(buffers),
      tokens_(tokens),
      inner_(std::move(inner)),
      recorder_(recorder) {
  require(tokens >= 0 && inner_ != nullptr,
          "Ulysses attention needs an inner executor and a number of tokens, got {}", tokens);
}

HeadSplit UlyssesAttention::split(const AttentionInputs& in) const {
  require(in.q.rank() == 3 && in.k.rank() == 3 && in.q.size(0) == own() && in.k.size(0) == own() &&
              in.v.shape() == in.k.shape() && in.q.size(2) == in.k.size(2),
          "Ulysses attention: this rank holds {} of {} tokens; q {}, k {}, v {} do not fit", own(),
          tokens_, to_string(in.q.shape()), to_string(in.k.shape()), to_string(in.v.shape()));
  const std::string problem = head_split_problem(in.q.size(1), sequence_.size());
  require(problem.empty(), "Ulysses attention: {}", problem);
  return {sequence_.size(), in.q.size(1), in.k.size(1)};
}

void UlyssesAttention::exchange(const std::vector<Transfer>& transfers) {
  Scope scope(recorder_, EventKind::sequence_exchange);
  for (const Transfer& t : transfers)
    if (t.send) scope.bytes += static_cast<std::int64_t>(t.tensor.bytes());
  sequence_.exchange(transfers).complete();
}

/// All tokens with this rank's heads of every part side by side: [tokens, local heads, D].  `lse`
/// [Hq, own tokens] (optional) becomes *whole_lse [local query heads, tokens].
RingBuffers::Lease UlyssesAttention::gather(const std::vector<Part>& parts, const HeadSplit& heads,
                                            const Tensor* lse, RingBuffers::Lease* whole_lse) {
  const int me = sequence_.rank();
  const DType type = parts.front().tensor.dtype();
  Device& device = device_of(parts.front().tensor.space());
  const std::int64_t dim = parts.front().tensor.size(2), query = heads.local_query_heads();
  std::int64_t width = 0;
  for (const Part& part : parts) width += part.kv ? heads.local_kv_heads() : query;

  RingBuffers::Lease whole = buffers_.take({tokens_, width, dim}, type, device);
  RingBuffers::Lease sent = buffers_.take({heads.ranks, own(), width, dim}, type, device),
                     lse_blocks;
  if (lse) {
    *whole_lse = buffers_.take({query, tokens_}, lse->dtype(), device);
    lse_blocks = buffers_.take({query * tokens_}, lse->dtype(), device);
  }
  const auto lse_block = [&](int p) {
    return lse_blocks.tensor.rows(query * begin(p), query * begin(p + 1))
        .reshape({query, tokens_of(p)});
  };
  std::vector<Transfer> transfers;
  for (int p = 0; p < heads.ranks; ++p) {
    const Tensor block = p == me ? whole.tensor.rows(begin(p), begin(p + 1))
                                 : sent.tensor.rows(p, p + 1).reshape({own(), width, dim});
    std::int64_t at = 0;
    for (const Part& part : parts) {
      const auto put = [&](std::int64_t first, std::int64_t count, std::int64_t local) {
        if (own() > 0)
          copy(part.tensor.narrow(1, first, first + count),
               block.narrow(1, at + local, at + local + count));
      };
      if (part.kv)
        for_kv_ranges(heads, p, put);
      else
        put(p * query, query, 0);
      at += part.kv ? heads.local_kv_heads() : query;
    }
    if (p == me) continue;
    transfers.push_back({whole.tensor.rows(begin(p), begin(p + 1)), p, false});
    transfers.push_back({block, p, true});
    if (!lse) continue;
    transfers.push_back({lse_block(p), p, false});
    transfers.push_back({lse->rows(p * query, (p + 1) * query), p, true});
  }
  exchange(transfers);
  for (int p = 0; lse && p < heads.ranks; ++p)
    if (tokens_of(p) > 0)
      copy(p == me ? lse->rows(p * query, (p + 1) * query) : lse_block(p),
           whole_lse->tensor.narrow(1, begin(p), begin(p + 1)));
  return whole;
}

void UlyssesAttention::forward(const AttentionInputs& in, Tensor& o, Tensor& lse) {
  const HeadSplit heads = split(in);
  const int me = sequence_.rank();
  Device& device = device_of(in.q.space());
  const std::int64_t dim = in.q.size(2), query = heads.local_query_heads(),
                     kv = heads.local_kv_heads();
  const RingBuffers::Lease whole =
      gather({{in.q, false}, {in.k, true}, {in.v, true}}, heads, nullptr, nullptr);
  RingBuffers::Lease whole_o = buffers_.take({tokens_, query, dim}, o.dtype(), device);
  RingBuffers::Lease whole_lse = buffers_.take({query, tokens_}, lse.dtype(), device);
  inner_->forward(slices(whole.tensor, in, query, kv), whole_o.tensor, whole_lse.tensor);

  const RingBuffers::Lease received =
      buffers_.take({heads.ranks, own(), query, dim}, o.dtype(), device);
  const RingBuffers::Lease lse_blocks = buffers_.take({query * tokens_}, lse.dtype(), device);
  std::vector<Transfer> transfers;
  const auto o_block = [&](int p) {
    return p == me ? whole_o.tensor.rows(begin(p), begin(p + 1))
                   : received.tensor.rows(p, p + 1).reshape({own(), query, dim});
  };
  for (int p = 0; p < heads.ranks; ++p) {
    const Tensor lse_block = p == me
                                 ? lse.rows(p * query, (p + 1) * query)
                                 : lse_blocks.tensor.rows(query * begin(p), query * begin(p + 1))
                                       .reshape({query, tokens_of(p)});
    if (tokens_of(p) > 0) copy(whole_lse.tensor.narrow(1, begin(p), begin(p + 1)), lse_block);
    if (p == me) continue;
    transfers.push_back({o_block(p), p, false});
    transfers.push_back({whole_o.tensor.rows(begin(p), begin(p + 1)), p, true});
    transfers.push_back({lse.rows(p * query, (p + 1) * query), p, false});
    transfers.push_back({lse_block, p, true});
  }
  exchange(transfers);
  for (int p = 0; own() > 0 && p < heads.ranks; ++p)
    copy(o_block(p), o.narrow(1, p * query, (p + 1) * query));
}

void UlyssesAttention::backward(const AttentionInputs& in, const Tensor& o, const Tensor& lse,
                                const Tensor& d_o, Tensor& dq, Tensor& dk, Tensor& dv) {
  const HeadSplit heads = split(in);
  Device& device = device_of(in.q.space());
  const std::int64_t dim = in.q.size(2), query = heads.local_query_heads(),
                     kv = heads.local_kv_heads();
  const DType kv_type =
      heads.repeats() ? lse.dtype() : in.k.dtype();  // repeated heads' gradients are partial sums
  RingBuffers::Lease whole_q = buffers_.take({tokens_, query, dim}, in.q.dtype(), device);
  RingBuffers::Lease whole_kv = buffers_.take({tokens_, 2 * kv, dim}, kv_type, device);
  {
    RingBuffers::Lease whole_lse;
    const RingBuffers::Lease whole =
        gather({{in.q, false}, {in.k, true}, {in.v, true}, {o, false}, {d_o, false}}, heads, &lse,
               &whole_lse);
    const std::int64_t at = query + 2 * kv;
    Tensor whole_dk = whole_kv.tensor.narrow(1, 0, kv),
           whole_dv = whole_kv.tensor.narrow(1, kv, 2 * kv);
    inner_->backward(slices(whole.tensor, in, query, kv), whole.tensor.narrow(1, at, at + query),
                     whole_lse.tensor, whole.tensor.narrow(1, at + query, at + 2 * query),
                     whole_q.tensor, whole_dk, whole_dv);
  }
  scatter_gradients(heads, whole_q.tensor, whole_kv.tensor, dq, dk, dv);
}

void UlyssesAttention::scatter_gradients(const HeadSplit& heads, const Tensor& whole_q,
                                         const Tensor& whole_kv, Tensor& dq, Tensor& dk,
                                         Tensor& dv) {
  const int me = sequence_.rank();
  const std::int64_t query = whole_q.size(1);
  std::vector<RingBuffers::Lease> buffers;
  std::vector<Transfer> transfers;
  std::vector<Tensor> blocks[2];  // [q; k and v][rank]: gradients of this rank's tokens
  for (const Tensor* whole : {&whole_q, &whole_kv}) {
    std::vector<Tensor>& list = blocks[buffers.size()];
    const Tensor& received =
        buffers
            .emplace_back(buffers_.take({heads.ranks, own(), whole->size(1), whole->size(2)},
                                        whole->dtype(), device_of(whole->space())))
            .tensor;
    for (int p = 0; p < heads.ranks; ++p)
      list.push_back(
          p == me ? whole->rows(begin(p), begin(p + 1))
                  : received.rows(p, p + 1).reshape({own(), whole->size(1), whole->size(2)}));
  }
  for (int p = 0; p < heads.ranks; ++p) {
    if (p == me) continue;
    for (const auto& [whole, list] : {std::pair{&whole_q, &blocks[0]}, {&whole_kv, &blocks[1]}}) {
      transfers.push_back({(*list)[static_cast<std::size_t>(p)], p, false});
      transfers.push_back({whole->rows(begin(p), begin(p + 1)), p, true});
    }
  }
  exchange(transfers);
  if (own() == 0) return;
  for (int p = 0; p < heads.ranks; ++p)
    copy(blocks[0][static_cast<std::size_t>(p)], dq.narrow(1, p * query, (p + 1) * query));
  sum_key_values(heads, blocks[1], dk, dv);
}

void UlyssesAttention::sum_key_values(const HeadSplit& heads, const std::vector<Tensor>& blocks,
                                      Tensor& dk, Tensor& dv) {
  const std::int64_t kv = heads.local_kv_heads();
  RingBuffers::Lease sums;
  Tensor dk_sum = dk, dv_sum = dv;
  if (heads.repeats()) {
    sums = buffers_.take({own(), 2 * heads.kv_heads, dk.size(2)}, blocks.front().dtype(),
                         device_of(dk.space()));
    dk_sum = sums.tensor.narrow(1, 0, heads.kv_heads);
    dv_sum = sums.tensor.narrow(1, heads.kv_heads, 2 * heads.kv_heads);
  }
  std::int64_t started =
      0;  // heads below have a first summand: ranks and their heads come in ascending order
  for (int p = 0; p < heads.ranks; ++p)
    for_kv_ranges(heads, p, [&](std::int64_t first, std::int64_t count, std::int64_t local) {
      const bool begins = first >= started;
      for (const auto& [sum, at] : {std::pair{&dk_sum, local}, {&dv_sum, kv + local}}) {
        Tensor target = sum->narrow(1, first, first + count);
        const Tensor summand = blocks[static_cast<std::size_t>(p)].narrow(1, at, at + count);
        if (begins)
          copy_rows(summand, target);
        else
          add(target, summand, target);
      }
      started = first + count;
    });
  if (!heads.repeats()) return;
  copy_rows(dk_sum, dk);
  copy_rows(dv_sum, dv);
}

}  // namespace ballast
